"""The stage, the op and the modules of a failure (`blame`, `ampcheck blame`).

blame       the search; case: one subject in one dtype; stats: the record, findings and tables
bisect      the first node of the compiled graphs that brings the failure
minimise    the smallest set of modules to keep in float32, as code
"""
