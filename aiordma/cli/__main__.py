"""``python -m aiordma.cli``: the ``aiordma`` command where no console script is installed."""

from aiordma.cli import main

main()
