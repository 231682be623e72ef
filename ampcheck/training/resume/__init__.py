"""Does an interrupted run go on as if it had not been?"""
