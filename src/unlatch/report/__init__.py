"""What is made of finished and simulated runs: tables, figures, pages and traces. Knows metrics and events, no method.

Read `page` first: it puts a comparison together from `record` (a run folder read back), `comparison` (rows), `figures`,
`timeline` and `measures` (what a method measured of itself). `sweep` is for simulations, `table` for the terminal.
"""
