"""What a run leaves on disk. Knows nothing of how training works.

`run_folder` is the folder of a run (read it first), `metrics` its numbers, `checkpoint` and `durable` what must survive
a crash, `versions` and `toml` what it depended on, `json_file` reads what others may have edited. For `train`, `cli`,
`report` and `plan`; users read the files.
"""
