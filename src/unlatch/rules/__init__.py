"""What a stage keeps, which weights it sees, what becomes of gradients, how it updates: what methods are composed of.

A rule is a small frozen object, the same for all stages; `at` makes what one stage uses of it. Others may build rules
and ask them (`Rules` and the classes it names); names with an underscore are each file's own. Read `bundle` first, then
`activations` and `weights`. `predict`, `closed_forms` and `average` serve `weights`; `ramp` serves methods with local
losses.
"""
