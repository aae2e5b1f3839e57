"""Device hints for DAX memory and other mapped pools, written exactly as a vendor outside of this tree would.

:mod:`maru_plugins_dax.plugin` has the hooks, ``docs/hints.md`` what each hint does, costs and gains.
"""
