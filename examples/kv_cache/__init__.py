"""A key-value cache whose values clients read and write by RDMA, in the server's memory.

The server is asked, by small messages, only where a value is or may go. A value itself is fetched by one RDMA read and
stored by RDMA writes, in which the server's CPU has no part.

In two terminals, in the folder ``examples``::

    python -m kv_cache serve --port 18600
    python -m kv_cache load --port 18600 --clients 4 --seconds 5

``layout.py`` says what lies in memory and in messages, ``store.py`` keeps the server's books, ``server.py`` and
``client.py`` are the two sides. docs/service.md tells why they are as they are.
"""
