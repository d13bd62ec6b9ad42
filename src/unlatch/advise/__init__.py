"""Which method suits, and what delay costs: asked before training, told in words.

`advice` applies the limits of `unlatch.schedule.stability` to a method and its optimizer; `prediction` puts a method on
given devices in virtual time; `ranking` compares all methods by speed, memory and risk. Read `prediction` first. It
trains nothing, and asks methods only through their hooks.
"""
