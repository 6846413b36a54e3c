"""What views do with one kernel beside running cells: widgets, completion, variables, values and files.

May import: ``coordinator.cells`` and what lies below it. Called by: the inbox and the requests of views.
"""
