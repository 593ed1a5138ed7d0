"""Writing datasets to a few large files. This package does not use torch, and imports a store's library on first use.

A job is divided into **parts**, each of which is a range of samples, by a plan that is made once and saved.
`stores.make_part` depends only on the plan and the part's number, so any process on any machine can make any part, in
any order, even twice: the bytes are the same. A part is complete when its **record** exists, which is written last.
"""
