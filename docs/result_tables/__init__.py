"""Tables of the documentation that are made of result files, by subject: each file lists its own.

`common` is what they share. `speeds`, `memory`, `accuracy` and `simulated` have tables of one result file each,
`studies` those of a study, with `answers` to the questions of some; `methods` and `decisions` draw on many files.
`write_tables.py`, beside this folder, puts them into the pages.
"""
