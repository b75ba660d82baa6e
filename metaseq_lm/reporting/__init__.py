"""Run folders to tables, significance and figures.

A report is made in this order: `folders` finds runs (`archive` those in files), `runs` reads them,
`settings` groups those that differ only in their seed, `table` summarises them (`numbers`), with
tests against a baseline (`significance`), and `formats`, `page` and `plots` write the result.
"""
