"""All that a run wrote down: one SQLite file for what decides, one for its curves and its last view.

May import: ``protocol``. Called by: ``coordinator``, which writes it, and ``client`` and ``tracking``, which read it.

- :mod:`.events` and :mod:`.state`: what happened to the cluster, and the pure reducer ``apply(state, event)``
- :mod:`.records`: what the training rounds write down, and a record as a row
- :mod:`.log`: the journal as the coordinator writes it; :mod:`.writer`: the thread that does; :mod:`.store`: SQLite,
  and where the files lie
- :mod:`.reading`: what a journal says; :mod:`.kept_rounds`: which rounds matter, and to whom
- :mod:`.curves`: curves in memory and on disk, and the last view
- :mod:`.kept_runs`: runs that are over, those of earlier versions among them
"""
