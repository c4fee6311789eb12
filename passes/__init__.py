"""The compiler: what happens to one Dynamo graph, in the order in which it happens.

Analyses return frozen records and touch nothing; rewrites take a record and decide nothing. `pipeline` calls them in order
and says why each stands where it does.
"""
