//! What a connection knows of its end.

use super::*;
use crate::handshake::Replies;
use crate::socket::peek;
use ringway_disk::CustomDisk;
use ringway_export::QueueLifecycle;
use ringway_nbd_words::{REQUEST_MAGIC, command};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

fn queue() -> (Queue, UnixStream) {
    let disk = Arc::new(CustomDisk::new(1 << 20).open(None).unwrap());
    let (ours, client) = UnixStream::pair().unwrap();
    let (replies, fast_zero) = (Replies::Simple, None);
    let rules = Rules { replies, block_status: false, read_only: false, trims: false, fast_zero };
    let (queue, _) = Queue::new(OwnedFd::from(ours), disk, rules, 4, true).unwrap();
    (queue, client)
}

fn head(kind: u16) -> Vec<u8> {
    let mut head = [&REQUEST_MAGIC.to_be_bytes()[..], &[0; 2], &kind.to_be_bytes()].concat();
    head.resize(28, 0);
    head
}

/// By then it is not in the socket any more.
#[test]
fn c51_a_disconnect_that_was_read_is_remembered() {
    for says_so in [false, true] {
        let (mut queue, client) = queue();
        let mut request = Request::with_capacity(4);
        let kind = if says_so { command::DISC } else { command::FLUSH };
        rustix::io::write(&client, &head(kind)).unwrap();
        let popped = queue.pop(&mut request);
        assert_eq!(popped.is_err(), says_so);
        drop(client);
        assert_eq!((queue.hang_up(true), queue.peer_is_gone()), (!says_so, !says_so));
        if let Ok(Pop::Request(token)) = popped {
            queue.complete(token, Status::Ok, 0);
        }
    }
}

fn may_say(queue: &Queue) -> bool {
    may_say_goodbye(&queue.socket.stream(), &queue.rules, queue.disk.capacity())
}

/// The session's thread looks first whether there may be one, up to a bound.
#[test]
fn f35_a_worker_looks_for_a_disconnect_only_where_one_may_be() {
    for kind in [command::DISC, command::FLUSH] {
        let (mut queue, client) = queue();
        rustix::io::write(&client, &[head(command::FLUSH).repeat(100), head(kind)].concat())
            .unwrap();
        drop(client);
        assert_eq!(may_say(&queue), kind == command::DISC);
        // It goes by what it is told, although the request is there.
        assert!(queue.hang_up(false));
        let may_say = may_say(&queue);
        assert_eq!(queue.hang_up(may_say), kind != command::DISC);
    }
}

/// What is sent without being received: more than is looked through, and less.
#[test]
fn f35_what_is_looked_through_has_a_bound() {
    let most = 28 * 10;
    for (requests, is_within) in [(8, true), (9, false), (100, false)] {
        let (queue, client) = queue();
        let sent = [head(command::FLUSH).repeat(requests), head(command::DISC)].concat();
        rustix::io::write(&client, &sent).unwrap();
        let looked = peek(&queue.socket.stream(), most);
        assert_eq!(looked, is_within.then_some(sent));
    }
}

/// The worker may have received a part of it, or all, when the session looks.
#[test]
fn f35_a_disconnect_is_found_wherever_it_is() {
    let sent = [head(command::FLUSH).repeat(3), head(command::DISC)].concat();
    for received in [70, 90, sent.len()] {
        let (mut queue, client) = queue();
        let mut request = Request::with_capacity(4);
        rustix::io::write(&client, &sent[..received]).unwrap();
        let popped = queue.pop(&mut request);
        rustix::io::write(&client, &sent[received..]).unwrap();
        drop(client);
        let may_say = may_say(&queue);
        assert!(may_say && !queue.hang_up(may_say), "{received}");
        let Ok(Pop::Request(token)) = popped else { panic!("a flush was asked for") };
        queue.complete(token, Status::Ok, 0);
    }
}
