"""Messages between processes, and the processes themselves.

`mail` is where messages wait (read it first), `wire` turns them into bytes by their `forms`, `link` carries them to a
rank of another machine, beside the computation; tensors of a device take the way of `staging` or of `lanes`. To ranks
of the same machine `local_link` carries them, as frames of `local_wire`, with their tensors in `shared_memory`. `world`
is what ranks do together outside of training, `together` lets them hear an alarm meanwhile, `health` notices who is
gone or stuck. `launch` runs functions on ranks, `nursery` starts these, `rank` is their life, `reports` what they tell
the launcher, `memory` what they held, `restarts` whether they are worth another start. `signals` hears requests to
stop, `forwarding` is what a launcher makes of them. Ranks find each other by `meeting`, in a `store`, where they leave
signed `notes`. `faults` says what is to go wrong on purpose, and `faulty_link` does it to messages. Nothing here knows
what a message means. `Ranks`, `launch` and `Faults` are public, the rest is for `runtime` and `train`.
"""
