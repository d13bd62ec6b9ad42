"""The one engine, and what it drives.

`engine` follows a schedule with the stations of a process; read it first, then `station` and `stage`. A stage computes
(`passes`), updates (`updating`), looks for NaN (`finite`) and measures itself (`measuring`, `metering`,
`reconstruction`). `trained` and `beside` are networks beside the stages. `evaluation` is one more schedule,
`recalibration` serves it, `events` is what was recorded, `blueprint` what stations are built from, `faulty` what goes
wrong at their work on purpose. Methods derive stations; users read events.
"""
