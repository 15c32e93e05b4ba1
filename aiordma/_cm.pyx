# cython: language_level=3
"""librdmacm's calls, without the GIL, on a library that is loaded at the first use.

Everything here may be slow: it's called in worker threads. What belongs together (an id and the calls on it) is kept
apart in time by the caller.
"""

import itertools
import os
import socket
import sys

from libc.errno cimport EAGAIN, EINTR, ENOSYS, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from aiordma cimport _ibv as v

from aiordma.errors import UnsupportedError, VerbsError

cdef extern from *:
    """
    #include <dlfcn.h>
    #include <errno.h>
    #include <fcntl.h>
    #include <netinet/in.h>
    #include <string.h>
    #include <rdma/rdma_cma.h>

    /* The library's functions, by name. Their types are those of its header, so that a change of it doesn't go unseen. */
    #define AIOR_CM_FUNCTIONS(F) \
        F(rdma_create_event_channel) F(rdma_destroy_event_channel) F(rdma_create_id) F(rdma_destroy_id) \
        F(rdma_bind_addr) F(rdma_resolve_addr) F(rdma_resolve_route) F(rdma_connect) F(rdma_establish) \
        F(rdma_listen) F(rdma_accept) F(rdma_reject) F(rdma_disconnect) F(rdma_get_cm_event) F(rdma_ack_cm_event) \
        F(rdma_init_qp_attr)
    #define AIOR_CM_DECLARE(name) static __typeof__(&name) aior_##name;
    AIOR_CM_FUNCTIONS(AIOR_CM_DECLARE)

    static const char *aior_cm_load(void)
    {
        static char missing[300];
        void *handle = dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL);

        if (!handle)
            return dlerror();
    #define AIOR_CM_FIND(name) \
        if (!(aior_##name = (__typeof__(&name))dlsym(handle, #name))) { \
            strncpy(missing, "it has no " #name "(): it's older than rdma-core 23", sizeof(missing) - 1); \
            return missing; \
        }
        AIOR_CM_FUNCTIONS(AIOR_CM_FIND)
        return NULL;
    }

    static uint16_t aior_cm_port(const struct sockaddr *a)
    {
        if (a->sa_family == AF_INET)
            return ntohs(((const struct sockaddr_in *)a)->sin_port);
        return a->sa_family == AF_INET6 ? ntohs(((const struct sockaddr_in6 *)a)->sin6_port) : 0;
    }

    static void aior_cm_fill4(struct sockaddr_storage *s, const void *ip, uint16_t port)
    {
        struct sockaddr_in *a = (struct sockaddr_in *)s;
        memset(s, 0, sizeof(*s));
        a->sin_family = AF_INET;
        a->sin_port = htons(port);
        memcpy(&a->sin_addr, ip, 4);
    }

    static void aior_cm_fill6(struct sockaddr_storage *s, const void *ip, uint16_t port, uint32_t flow, uint32_t scope)
    {
        struct sockaddr_in6 *a = (struct sockaddr_in6 *)s;
        memset(s, 0, sizeof(*s));
        a->sin6_family = AF_INET6;
        a->sin6_port = htons(port);
        a->sin6_flowinfo = htonl(flow);
        a->sin6_scope_id = scope;
        memcpy(&a->sin6_addr, ip, 16);
    }

    static const void *aior_cm_ip(const struct sockaddr *a, uint32_t *scope)
    {
        if (a->sa_family == AF_INET)
            return &((const struct sockaddr_in *)a)->sin_addr;
        *scope = ((const struct sockaddr_in6 *)a)->sin6_scope_id;
        return &((const struct sockaddr_in6 *)a)->sin6_addr;
    }

    static struct rdma_conn_param *aior_cm_conn(struct rdma_cm_event *e) { return &e->param.conn; }
    static struct sockaddr *aior_cm_local(struct rdma_cm_id *id) { return rdma_get_local_addr(id); }
    static struct sockaddr *aior_cm_peer(struct rdma_cm_id *id) { return rdma_get_peer_addr(id); }
    """
    struct rdma_event_channel:
        int fd
    struct rdma_cm_id:
        v.ibv_context *verbs
        void *context
        uint8_t port_num
    struct rdma_conn_param:
        const void *private_data
        uint8_t private_data_len
        uint8_t responder_resources
        uint8_t initiator_depth
        uint8_t flow_control
        uint8_t retry_count
        uint8_t rnr_retry_count
        uint8_t srq
        uint32_t qp_num
    struct rdma_cm_event:
        rdma_cm_id *id
        rdma_cm_id *listen_id
        int event
        int status
    struct sockaddr:
        uint16_t sa_family
    struct sockaddr_storage:
        pass
    enum:
        AF_INET
        AF_INET6
        O_NONBLOCK
        F_GETFL
        F_SETFL
        RDMA_PS_TCP
        RDMA_CM_EVENT_CONNECT_REQUEST
        RDMA_CM_EVENT_DISCONNECTED
    const char *aior_cm_load()
    rdma_event_channel *aior_rdma_create_event_channel() nogil
    void aior_rdma_destroy_event_channel(rdma_event_channel *) nogil
    int aior_rdma_create_id(rdma_event_channel *, rdma_cm_id **, void *, int) nogil
    int aior_rdma_destroy_id(rdma_cm_id *) nogil
    int aior_rdma_bind_addr(rdma_cm_id *, sockaddr *) nogil
    int aior_rdma_resolve_addr(rdma_cm_id *, sockaddr *, sockaddr *, int) nogil
    int aior_rdma_resolve_route(rdma_cm_id *, int) nogil
    int aior_rdma_connect(rdma_cm_id *, rdma_conn_param *) nogil
    int aior_rdma_establish(rdma_cm_id *) nogil
    int aior_rdma_listen(rdma_cm_id *, int) nogil
    int aior_rdma_accept(rdma_cm_id *, rdma_conn_param *) nogil
    int aior_rdma_reject(rdma_cm_id *, const void *, uint8_t) nogil
    int aior_rdma_disconnect(rdma_cm_id *) nogil
    int aior_rdma_get_cm_event(rdma_event_channel *, rdma_cm_event **) nogil
    int aior_rdma_ack_cm_event(rdma_cm_event *) nogil
    int aior_rdma_init_qp_attr(rdma_cm_id *, v.ibv_qp_attr *, int *) nogil
    uint16_t aior_cm_port(const sockaddr *)
    void aior_cm_fill4(sockaddr_storage *, const void *, uint16_t)
    void aior_cm_fill6(sockaddr_storage *, const void *, uint16_t, uint32_t, uint32_t)
    const void *aior_cm_ip(const sockaddr *, uint32_t *)
    rdma_conn_param *aior_cm_conn(rdma_cm_event *) nogil
    sockaddr *aior_cm_local(rdma_cm_id *)
    sockaddr *aior_cm_peer(rdma_cm_id *)
    int fcntl(int, int, ...) nogil

cdef extern from "<infiniband/verbs.h>" nogil:
    uint64_t ibv_get_device_guid(v.ibv_device *)

# What rdma_init_qp_attr(3) may ask for; bits beyond are of later kernels, and one kernel sets some by mistake.
cdef int _KNOWN_MASK = (1 << 21) - 1

cdef bint _loaded = False
# An id's context: never the same number twice, unlike its address, so that an event that comes late meets nobody.
_tokens = itertools.count(1)


def load() -> None:
    """Loads librdmacm; :class:`UnsupportedError` says why it can't be."""
    global _loaded
    cdef const char *problem
    if _loaded:
        return
    problem = aior_cm_load()
    if problem != NULL:
        raise UnsupportedError("this system", "rdma_cm", (<bytes>problem).decode("utf-8", "replace"))
    _loaded = True


cdef int _fill(sockaddr_storage *to, object endpoint) except -1:
    """A pair of address family and the socket module's address, as C has it."""
    family, address = endpoint
    cdef bytes ip = socket.inet_pton(family, address[0].partition("%")[0])
    if family == socket.AF_INET:
        aior_cm_fill4(to, <const char *>ip, address[1])
    else:
        aior_cm_fill6(to, <const char *>ip, address[1], address[2], address[3])
    return 0


cdef object _address(const sockaddr *a):
    """The socket module's address, or None where it's of no IP family."""
    cdef uint32_t scope = 0
    cdef const void *ip
    if a.sa_family == AF_INET:
        ip = aior_cm_ip(a, &scope)
        return (socket.inet_ntop(socket.AF_INET, (<const char *>ip)[:4]), aior_cm_port(a))
    if a.sa_family == AF_INET6:
        ip = aior_cm_ip(a, &scope)
        return (socket.inet_ntop(socket.AF_INET6, (<const char *>ip)[:16]), aior_cm_port(a), 0, scope)
    return None


cdef class EventChannel:
    """A ``struct rdma_event_channel`` (rdma_create_event_channel(3)), its descriptor non-blocking."""

    cdef rdma_event_channel *channel
    cdef readonly int fd

    def __cinit__(self):
        cdef int err = 0
        load()
        with nogil:
            self.channel = aior_rdma_create_event_channel()
            if self.channel == NULL:
                err = errno
        if err:
            raise VerbsError("rdma_create_event_channel", err)
        self.fd = self.channel.fd
        fcntl(self.fd, F_SETFL, fcntl(self.fd, F_GETFL) | O_NONBLOCK)

    def drain(self, int limit=256) -> list:
        """Takes the events that are there, up to ``limit``, and acknowledges them: ``(token, event, status, parameters,
        private_data, new)`` each.

        ``token``: the id's; ``event``: enum rdma_cm_event_type; ``status``; ``parameters``: (responder_resources,
        initiator_depth, qp_num) of connection events; ``new``: the :class:`Id` of a connection request, else None.
        """
        cdef rdma_cm_event *event
        cdef rdma_conn_param *conn
        cdef int rc = 0, err = 0, _
        cdef list found = []
        cdef Id new
        for _ in range(limit):
            with nogil:
                event = NULL
                rc = aior_rdma_get_cm_event(self.channel, &event)
                if rc:
                    err = errno
            if rc:
                if err == EINTR:
                    continue
                # Those that were taken are not to be lost: if the error stays, the next call raises it.
                if err != EAGAIN and not found:
                    raise VerbsError("rdma_get_cm_event", err)
                break
            data, parameters, new = b"", (0, 0, 0), None
            # Of the others the union holds something else, or nothing.
            if RDMA_CM_EVENT_CONNECT_REQUEST <= event.event <= RDMA_CM_EVENT_DISCONNECTED:
                conn = aior_cm_conn(event)
                parameters = (conn.responder_resources, conn.initiator_depth, conn.qp_num)
                if conn.private_data != NULL:
                    data = (<const char *>conn.private_data)[:conn.private_data_len]
            token = <uintptr_t>event.id.context
            if event.event == RDMA_CM_EVENT_CONNECT_REQUEST:
                # The new id has its listener's context.
                new = Id.__new__(Id)
                new._adopt(event.id)
            found.append((token, event.event, event.status, parameters, data, new))
            with nogil:
                aior_rdma_ack_cm_event(event)
        return found

    def destroy(self) -> None:
        """rdma_destroy_event_channel(3), after its ids; a second call does nothing."""
        cdef rdma_event_channel *channel = self.channel
        self.channel = NULL
        if channel != NULL:
            with nogil:
                aior_rdma_destroy_event_channel(channel)

    @property
    def alive(self) -> bool:
        return self.channel != NULL


cdef class Id:
    """A ``struct rdma_cm_id`` of RDMA_PS_TCP. Its owner destroys it once, when no other call on it is under way."""

    cdef rdma_cm_id *id
    cdef readonly object token
    cdef object _pid

    def __init__(self, EventChannel channel not None):
        cdef int rc, err = 0
        cdef rdma_cm_id *made = NULL
        if channel.channel == NULL:
            raise VerbsError("rdma_create_id", ENOSYS, "the event channel is closed")
        self.token = next(_tokens)
        self._pid = os.getpid()
        cdef uintptr_t context = self.token
        with nogil:
            rc = aior_rdma_create_id(channel.channel, &made, <void *>context, RDMA_PS_TCP)
            if rc:
                err = errno
        if rc:
            raise VerbsError("rdma_create_id", err)
        self.id = made

    cdef int _adopt(self, rdma_cm_id *made) except -1:
        self.token = next(_tokens)
        self._pid = os.getpid()
        made.context = <void *><uintptr_t>self.token
        self.id = made
        return 0

    cdef rdma_cm_id *_there(self, str verb) except NULL:
        if self.id == NULL:
            raise VerbsError(verb, ENOSYS, "the id is destroyed")
        return self.id

    # ---------------------------------------------------------------- what it is

    @property
    def alive(self) -> bool:
        return self.id != NULL

    @property
    def device_name(self) -> str | None:
        """The name of the device that it's bound to, None while it's bound to none."""
        if self.id == NULL or self.id.verbs == NULL:
            return None
        return (<bytes>self.id.verbs.device.name).decode()

    @property
    def device_guid(self) -> str | None:
        """The GUID of that device in hexadecimal."""
        if self.id == NULL or self.id.verbs == NULL:
            return None
        raw = int(ibv_get_device_guid(self.id.verbs.device)).to_bytes(8, sys.byteorder)
        return raw.hex()

    @property
    def port_num(self) -> int:
        """The device's port."""
        return self.id.port_num if self.id != NULL else 0

    @property
    def local(self):
        """The local address as the socket module has it, or None."""
        return _address(aior_cm_local(self.id)) if self.id != NULL else None

    @property
    def peer(self):
        """The peer's."""
        return _address(aior_cm_peer(self.id)) if self.id != NULL else None

    # ---------------------------------------------------------------- verbs

    def bind(self, endpoint) -> None:
        """rdma_bind_addr(3). ``endpoint``: address family, and the socket module's address."""
        cdef rdma_cm_id *there = self._there("rdma_bind_addr")
        cdef sockaddr_storage to
        cdef int rc, err
        _fill(&to, endpoint)
        with nogil:
            rc = aior_rdma_bind_addr(there, <sockaddr *>&to)
            err = errno
        if rc:
            raise VerbsError("rdma_bind_addr", err)

    def listen(self, int backlog) -> None:
        """rdma_listen(3)."""
        cdef rdma_cm_id *there = self._there("rdma_listen")
        cdef int rc, err
        with nogil:
            rc = aior_rdma_listen(there, backlog)
            err = errno
        if rc:
            raise VerbsError("rdma_listen", err)

    def resolve_addr(self, endpoint, int timeout_ms) -> None:
        """rdma_resolve_addr(3): RDMA_CM_EVENT_ADDR_RESOLVED or ADDR_ERROR follows."""
        cdef rdma_cm_id *there = self._there("rdma_resolve_addr")
        cdef sockaddr_storage to
        cdef int rc, err
        _fill(&to, endpoint)
        with nogil:
            rc = aior_rdma_resolve_addr(there, NULL, <sockaddr *>&to, timeout_ms)
            err = errno
        if rc:
            raise VerbsError("rdma_resolve_addr", err)

    def resolve_route(self, int timeout_ms) -> None:
        """rdma_resolve_route(3): RDMA_CM_EVENT_ROUTE_RESOLVED or ROUTE_ERROR follows."""
        cdef rdma_cm_id *there = self._there("rdma_resolve_route")
        cdef int rc, err
        with nogil:
            rc = aior_rdma_resolve_route(there, timeout_ms)
            err = errno
        if rc:
            raise VerbsError("rdma_resolve_route", err)

    cdef int _param(self, rdma_conn_param *p, bytes private_data, int responder_resources, int initiator_depth,
                    int retry_count, int rnr_retry_count, bint srq, uint32_t qp_num) except -1:
        memset(p, 0, sizeof(rdma_conn_param))
        p.private_data = <const char *>private_data
        p.private_data_len = len(private_data)
        p.responder_resources = responder_resources
        p.initiator_depth = initiator_depth
        p.flow_control = 1
        p.retry_count = retry_count
        p.rnr_retry_count = rnr_retry_count
        p.srq = srq
        p.qp_num = qp_num
        return 0

    def connect(self, bytes private_data, int responder_resources, int initiator_depth, int retry_count,
                int rnr_retry_count, bint srq, uint32_t qp_num) -> None:
        """rdma_connect(3) for a QP that isn't the id's: RDMA_CM_EVENT_CONNECT_RESPONSE or an error's event follows."""
        cdef rdma_cm_id *there = self._there("rdma_connect")
        cdef rdma_conn_param p
        cdef int rc, err
        self._param(&p, private_data, responder_resources, initiator_depth, retry_count, rnr_retry_count, srq, qp_num)
        with nogil:
            rc = aior_rdma_connect(there, &p)
            err = errno
        if rc:
            raise VerbsError("rdma_connect", err)

    def establish(self) -> None:
        """rdma_establish(3): RDMA_CM_EVENT_ESTABLISHED follows at the passive side."""
        cdef rdma_cm_id *there = self._there("rdma_establish")
        cdef int rc, err
        with nogil:
            rc = aior_rdma_establish(there)
            err = errno
        if rc:
            raise VerbsError("rdma_establish", err)

    def accept(self, bytes private_data, int responder_resources, int initiator_depth, int rnr_retry_count, bint srq,
               uint32_t qp_num) -> None:
        """rdma_accept(3) for a QP that isn't the id's: RDMA_CM_EVENT_ESTABLISHED or an error's event follows."""
        cdef rdma_cm_id *there = self._there("rdma_accept")
        cdef rdma_conn_param p
        cdef int rc, err
        self._param(&p, private_data, responder_resources, initiator_depth, 0, rnr_retry_count, srq, qp_num)
        with nogil:
            rc = aior_rdma_accept(there, &p)
            err = errno
        if rc:
            raise VerbsError("rdma_accept", err)

    def reject(self, bytes private_data) -> None:
        """rdma_reject(3)."""
        cdef rdma_cm_id *there = self._there("rdma_reject")
        cdef const char *data = private_data
        cdef uint8_t size = len(private_data)
        cdef int rc, err
        with nogil:
            rc = aior_rdma_reject(there, data, size)
            err = errno
        if rc:
            raise VerbsError("rdma_reject", err)

    def disconnect(self) -> None:
        """rdma_disconnect(3): RDMA_CM_EVENT_DISCONNECTED follows at both sides. It doesn't touch a QP that isn't the id's."""
        cdef rdma_cm_id *there = self._there("rdma_disconnect")
        cdef int rc, err
        with nogil:
            rc = aior_rdma_disconnect(there)
            err = errno
        if rc:
            raise VerbsError("rdma_disconnect", err)

    def qp_attributes(self, int state) -> tuple:
        """rdma_init_qp_attr(3): the mask and the values that take a QP to ``state``, as ``_control.modify_qp`` takes them."""
        cdef rdma_cm_id *there = self._there("rdma_init_qp_attr")
        cdef v.ibv_qp_attr a
        cdef int rc, err, mask = 0
        memset(&a, 0, sizeof(a))
        a.qp_state = <v.ibv_qp_state>state
        with nogil:
            rc = aior_rdma_init_qp_attr(there, &a, &mask)
            err = errno
        if rc:
            raise VerbsError("rdma_init_qp_attr", err)
        return mask & _KNOWN_MASK, {
            "qp_state": <int>a.qp_state,
            "path_mtu": <int>a.path_mtu,
            "rq_psn": a.rq_psn,
            "sq_psn": a.sq_psn,
            "dest_qp_num": a.dest_qp_num,
            "qp_access_flags": a.qp_access_flags,
            "pkey_index": a.pkey_index,
            "max_rd_atomic": a.max_rd_atomic,
            "max_dest_rd_atomic": a.max_dest_rd_atomic,
            "min_rnr_timer": a.min_rnr_timer,
            "port_num": a.port_num,
            "timeout": a.timeout,
            "retry_cnt": a.retry_cnt,
            "rnr_retry": a.rnr_retry,
            "dgid": <bytes>(<const char *>a.ah_attr.grh.dgid.raw)[:16],
            "sgid_index": a.ah_attr.grh.sgid_index,
            "hop_limit": a.ah_attr.grh.hop_limit,
            "traffic_class": a.ah_attr.grh.traffic_class,
            "flow_label": a.ah_attr.grh.flow_label,
            "dlid": a.ah_attr.dlid,
            "sl": a.ah_attr.sl,
            "src_path_bits": a.ah_attr.src_path_bits,
            "static_rate": a.ah_attr.static_rate,
            "is_global": a.ah_attr.is_global,
            "ah_port": a.ah_attr.port_num,
        }

    def destroy(self) -> None:
        """rdma_destroy_id(3), which waits until its events are acknowledged; a second call does nothing."""
        cdef rdma_cm_id *there = self.id
        cdef int rc, err
        self.id = NULL
        # In a child of fork() the descriptor is the parent's, and so would the destroyed id be.
        if there == NULL or self._pid != os.getpid():
            return
        with nogil:
            rc = aior_rdma_destroy_id(there)
            err = errno
        if rc:
            raise VerbsError("rdma_destroy_id", err)
