"""Run folders as a page on loopback that follows them, while they train and afterwards.

`following` reads a folder that a run may be writing to (read it first), `document` says it in the words of the page
(`report.board`), `server` answers a browser, `beside` keeps a server in a process of its own beside training, whose
program is `__main__`. Nothing here trains or imports torch: all that is shown comes from files. For `cli`.
"""
