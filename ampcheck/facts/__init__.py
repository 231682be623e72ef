"""Facts about the memory of tensors: one store by storage, and the domains of facts that are kept in it.

- `values`: the companions exact and moved, with the roundings, the faults and the suspects of a storage; `sides`
  computes them when an op uses them first, and packs what lives from one step to the next
- `linear`: as what multiple, sum or function of earlier values a value came about
- `degree`: with which power of the loss scale a value changes
"""
