"""What a run leaves on disk. Knows nothing of how training works.

`run_folder` is the folder of a run (read it first), `metrics` its numbers, `checkpoint` and `durable` what must survive
a crash, `checkpoints` which of them stay, `versions` what it depended on. `optional` writes what a run can
do without, `space` asks whether there is room, `json_file` reads what others may have edited. For `train`, `cli`,
`report` and `plan`; users read the files. `Checkpoints` is public.
"""
