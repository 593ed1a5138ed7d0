"""Datasets written to few large files. No torch; the libraries of stores are imported at their first use.

A job is cut into **parts**: the samples i … j of the dataset, by a plan that is made once and kept. `job.make_part`
makes one, a function of the plan and the part's number alone, so any process on any machine may do it, in any order,
twice: the bytes are the same. What is whole is known by a part's **record**, which is written after it.
"""
