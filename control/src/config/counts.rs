//! Numbers of the command line and of files: queues, descriptors, connections.

use serde::Deserialize;
use serde::de::{Deserializer, Error};

/// The most queues of a disk. A vhost-user message names queues with eight bits; a guest has no use
/// for more than one per CPU.
const QUEUES_MAX: u16 = 256;

/// The smallest ring that holds a request (header, data, status) and leaves room for the next.
const QUEUE_SIZE_MIN: u16 = 4;

/// VIRTIO 1.2 §2.7: the largest split ring.
const QUEUE_SIZE_MAX: u16 = 32768;

/// The most connections to a server that can be asked for.
const CONNECTIONS_MAX: u16 = 64;

pub(super) fn queues(word: &str) -> Result<u16, String> {
    let number = word.parse().map_err(|_| "it is not a number".to_owned())?;
    check_queues(number)
}

fn check_queues(number: u64) -> Result<u16, String> {
    match u16::try_from(number) {
        Ok(n @ 1..=QUEUES_MAX) => Ok(n),
        _ => Err(format!("a disk has 1 to {QUEUES_MAX} queues, not {number}")),
    }
}

pub(super) fn queue_size(word: &str) -> Result<u16, String> {
    let number = word.parse().map_err(|_| "it is not a number".to_owned())?;
    check_queue_size(number)
}

fn check_queue_size(number: u64) -> Result<u16, String> {
    match u16::try_from(number) {
        Ok(n @ QUEUE_SIZE_MIN..=QUEUE_SIZE_MAX) if n.is_power_of_two() => Ok(n),
        _ => Err(format!(
            "a ring has a power of two of descriptors from {QUEUE_SIZE_MIN} to {QUEUE_SIZE_MAX}, \
             not {number}"
        )),
    }
}

pub(super) fn queues_in_file<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u16>, D::Error> {
    let number = Option::<u64>::deserialize(deserializer)?;
    number.map(check_queues).transpose().map_err(D::Error::custom)
}

pub(super) fn queue_size_in_file<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u16>, D::Error> {
    let number = Option::<u64>::deserialize(deserializer)?;
    number.map(check_queue_size).transpose().map_err(D::Error::custom)
}

pub(super) fn server_connections_in_file<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<u16>, D::Error> {
    match Option::<u64>::deserialize(from)? {
        None => Ok(None),
        Some(number) => match u16::try_from(number) {
            Ok(number @ 1..=CONNECTIONS_MAX) => Ok(Some(number)),
            _ => Err(D::Error::custom(format!(
                "a disk has 1 to {CONNECTIONS_MAX} connections to its server, not {number}"
            ))),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_make_no_queue_are_refused() {
        assert_eq!(queues("256"), Ok(256));
        for word in ["0", "257", "65536", "many", "-1"] {
            assert!(queues(word).is_err(), "{word}");
        }
        assert_eq!(queue_size("32768"), Ok(32768));
        for word in ["0", "2", "1000", "65536"] {
            assert!(queue_size(word).is_err(), "{word}");
        }
    }
}
