"""DEVX: firmware commands from the application, as awaitables.

Verbs hides most of what a queue pair or completion queue is on the device; DEVX shows it. Commands and contexts are
structures of the Programmer's Reference Manual with fields by name::

    from aiordma.mlx5 import devx

    state = await devx.query_qp(qp)
    print(state.state, state.remote_qpn, state.dump())

Three layers: queries and changes of verbs objects with structures (``query_qp``, ``modify_srq``, ...), the same with bytes
(``qp_query``, ``srq_modify``, ...: the ten calls of mlx5dv_devx_qp_modify(3)), and objects and commands of DEVX's own
(``create_object``, ``general_command``, ``open_command_channel``).

A device that isn't mlx5's or that was opened without DEVX raises :class:`UnsupportedError`; what the firmware refuses
raises :class:`DevxError` with its status and syndrome.
"""

from aiordma.errors import DevxError
from aiordma.mlx5.devx import caps, commands, contexts, enums
from aiordma.mlx5.devx.calls import general_command
from aiordma.mlx5.devx.caps import *  # noqa: F403
from aiordma.mlx5.devx.commands import *  # noqa: F403
from aiordma.mlx5.devx.contexts import *  # noqa: F403
from aiordma.mlx5.devx.enums import *  # noqa: F403
from aiordma.mlx5.devx.objects import CommandChannel, DevxObject, create_object, open_command_channel
from aiordma.mlx5.devx.prm import Array, Field, Nested, Raw, Struct
from aiordma.mlx5.devx.queries import (
    modify_cq,
    modify_ind_table,
    modify_qp,
    modify_srq,
    modify_wq,
    query_cq,
    query_dct,
    query_hca_cap,
    query_ind_table,
    query_qp,
    query_qp_ext,
    query_srq,
    query_wq,
)
from aiordma.mlx5.devx.raw import (
    cq_modify,
    cq_query,
    ind_tbl_modify,
    ind_tbl_query,
    qp_modify,
    qp_query,
    srq_modify,
    srq_query,
    wq_modify,
    wq_query,
)

__all__ = [
    "Array",
    "CommandChannel",
    "DevxError",
    "DevxObject",
    "Field",
    "Nested",
    "Raw",
    "Struct",
    "cq_modify",
    "cq_query",
    "create_object",
    "general_command",
    "ind_tbl_modify",
    "ind_tbl_query",
    "modify_cq",
    "modify_ind_table",
    "modify_qp",
    "modify_srq",
    "modify_wq",
    "open_command_channel",
    "qp_modify",
    "qp_query",
    "query_cq",
    "query_dct",
    "query_hca_cap",
    "query_ind_table",
    "query_qp",
    "query_qp_ext",
    "query_srq",
    "query_wq",
    "srq_modify",
    "srq_query",
    "wq_modify",
    "wq_query",
]
__all__ += caps.__all__
__all__ += commands.__all__
__all__ += contexts.__all__
__all__ += enums.__all__
