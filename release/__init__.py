"""A wheel and a source distribution that may be given to people: ``make wheel``, or ``python -m release``.

:mod:`.check` says what is missing or does not agree, :mod:`.__main__` builds and refuses. A wheel that ``pip install``
makes from a checkout may lack the JupyterLab part (``labextension/hatch_build.py``); one of a release may not.
"""
