"""``gpuload doctor``: what of this machine and this installation works, what does not, and how to fix it.

Each check is a small function from facts to a `Finding`; the facts are gathered in `gpuload.cli.doctor.gather`, and
what can crash or hang is tried in processes of their own (`gpuload.cli.doctor.trial`).
"""
