"""What does it cost to start? Fresh processes with cold caches, warm ones and artifacts; and when it has paid.

judge      the entry points and the tables; checks: the findings
measure    launches the processes; room: what each of them does; stats: what is left of it
breakeven  after how many calls compilation has paid
"""
