"""Messages between processes, and the processes themselves.

`mail` is where messages wait (read it first), `wire` turns them into bytes, `link` carries them to one other rank,
beside the computation. `world` is what ranks do together outside of training, `health` notices who is gone or stuck,
`launch` starts ranks, `rank` is their life, `signals` hears requests to stop. Ranks find each other by `meeting`, in a
`store`, where they leave signed `notes`. Nothing here knows what a message means. `Ranks` and `launch` are public, the
rest is for `runtime` and `train`.
"""
