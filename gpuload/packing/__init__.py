"""Datasets written to few large files. No torch; the libraries of stores are imported at their first use.

A job is cut into **parts**: the samples i … j of the dataset, by a plan that is made once and written down.
`stores.make_part` depends on the plan and the part's number alone, so any process on any machine may make a part, in
any order, twice: the bytes are the same. A part is complete when its **record** is there, which is written after it.
"""
