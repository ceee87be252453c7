"""Model weights outside the process image: what a load wrote, and how it leaves and comes back.

The one rule: importing this package imports nothing, because ranks do it before their engine imports torch.
"""
