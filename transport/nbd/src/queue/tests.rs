//! What a connection knows of its end.

use super::*;
use crate::handshake::Replies;
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
        assert_eq!((queue.hang_up(), queue.peer_is_gone()), (!says_so, !says_so));
        if let Ok(Pop::Request(token)) = popped {
            queue.complete(token, Status::Ok, 0);
        }
    }
}
