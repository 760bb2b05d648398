//! The list of events: what `ctl events` tells, in words for people.

use crate::happened::words;
use ringway_control::protocol::Event;
use serde::Serialize;

/// One line of the list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Entry {
    /// Milliseconds since 1970: when it was heard of.
    pub(super) at: u64,
    /// What it is, in a word or two.
    pub(super) kind: &'static str,
    /// Something that somebody should look at.
    pub(super) bad: bool,
    /// The number of the disk it is about.
    pub(super) disk: Option<u64>,
    /// The disk by its image, or the daemon by its socket.
    pub(super) of: String,
    pub(super) text: String,
}

impl Entry {
    /// What a daemon has told.
    pub(super) fn new(event: Event, at: u64, daemon: &str) -> Self {
        let (kind, bad, text) = words(event.happened);
        Self { at, kind, bad, disk: event.id, of: event.image.unwrap_or(daemon.into()), text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn entry(mut event: Value) -> Entry {
        event["version"] = 1.into();
        event["number"] = 1.into();
        event["time_us"] = 1.into();
        Entry::new(serde_json::from_value(event).unwrap(), 7, "ctl")
    }

    #[test]
    fn events_are_told_in_words() {
        let held = json!({
            "count": 3, "age_us": 0, "operation": "write", "errno": 28, "retry_us": null,
            "error": "No space left on device",
        });
        let logged = entry(json!({"event": "held", "id": 4, "image": "a.img", "held": held}));
        assert_eq!((logged.at, logged.kind, logged.bad, logged.disk), (7, "held", true, Some(4)));
        assert_eq!(
            (&*logged.of, &*logged.text),
            ("a.img", "3 waiting; write: No space left on device")
        );
        let done = json!({
            "event": "reloaded", "added": ["b.img"], "removed": [], "deleted": [], "dry_run": false, "limited": ["a.img", "c.img"],
            "policies": [], "unchanged": 1, "left": [], "failed": [],
        });
        let logged = entry(done);
        assert_eq!((logged.kind, logged.bad, &*logged.of), ("reloaded", false, "ctl"));
        assert_eq!(logged.text, "1 added, 2 with other limits");
        let logged = entry(json!({"event": "disconnected", "why": null}));
        assert_eq!((logged.bad, &*logged.text), (false, ""));
        assert!(entry(json!({"event": "disconnected", "why": "it sent nonsense"})).bad);
        let resized = json!({"event": "resized", "from": 10737418240u64, "to": 1073741824, "guest_notice": "yes"});
        assert_eq!(entry(resized).text, "from 10 GiB to 1 GiB; guest told: yes");
    }
}
