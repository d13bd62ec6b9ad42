"""What is made of finished and simulated runs: tables, figures, pages and traces. Knows metrics and events, no method.

Read `page` first: it puts a comparison together from `record` (a run folder read back), `comparison` (rows), `figures`,
`timeline` and `measures` (what a method measured of itself). `board` is the document that every page draws, `web` the
page itself, `steady` the part of a run that is worth a picture. `sweep` is for simulations, `table` for the terminal.
"""
