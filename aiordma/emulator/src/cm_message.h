/* SPDX-License-Identifier: MIT
 * What cm_message.c has for those who send and receive them or drop them: cm_connect.c, cm_receive.c, cm_sidr.c, cm_id.c. */
#ifndef AIORDMA_CM_MESSAGE_H
#define AIORDMA_CM_MESSAGE_H

#include "cm.h"

uint32_t cm_exponent_ms(uint32_t e); /* of 4.096 us << e */
uint8_t cm_ack_timeout(uint8_t packet_life_time);

void cm_message_begin(const struct cm_id *, struct cm_message *, uint32_t type);
bool cm_send_to_peer(struct cm_id *, const struct cm_message *);
void cm_send_plain(struct cm_id *, uint32_t type);
void cm_send_reject(struct cm_id *, uint8_t reason, const void *data, uint8_t len);
void cm_reply(const struct cm_message *to, struct cm_message *, uint32_t type);

/* One message of an identifier is kept, to be sent again when its deadline has passed. */
int cm_keep(struct cm_id *, const struct cm_message *);
void cm_send_kept(struct cm_id *);
void cm_forget_sent(struct cm_id *);
void cm_enter_timewait(struct cm_id *);
void cm_reset_to_idle(struct cm_id *);

/* Requests, of connections and datagrams. */
struct cm_message *cm_request_new(struct cm_id *, uint32_t type);
void cm_request_send(struct cm_id *);
struct cm_id *cm_request_receive(const struct cm_message *, struct cm_id *listener, int *error);
struct cm_id *cm_listener_of(const struct cm_message *);
struct cm_id *cm_id_of_sender(const struct cm_message *); /* the one that an earlier request of the sender's made */
bool cm_sent_again(const struct cm_message *, enum cm_conn_state state); /* then that one has been answered again */

#endif
