//! What people are told of a connection that ends. Lines of the whole process are looked at here.
#![allow(missing_docs)]

use ringway_disk::{EngineKind, Source};
use ringway_testkit::raw::{NEED_REPLY, RawClient, request};
use ringway_testkit::rig::{Rig, RigOptions};
use std::fmt::Debug;
use std::sync::Mutex;
use tracing::field::{Field, Visit};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Warnings;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, about: &tracing::Metadata<'_>) -> bool {
        *about.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        LINES.lock().unwrap().push(line.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn why_a_connection_ended_is_told() {
    tracing::subscriber::set_global_default(Warnings).unwrap();
    let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
    let mut rig = Rig::start(&RigOptions::new(source, EngineKind::Null));
    let mut ended = |bytes: &[u8]| {
        let client = RawClient::new(rig.connect());
        client.send_bytes(bytes, &[]).unwrap();
        client.hang_up();
        drop(client);
        rig.join_sessions();
        std::mem::take(&mut *LINES.lock().unwrap())
    };
    let header = |flags| [request::GET_QUEUE_NUM, flags, 0].map(u32::to_ne_bytes).concat();
    assert_eq!(ended(&[]), [""; 0], "who leaves is no matter for anybody");
    let lines = ended(&header(2 | NEED_REPLY));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("connection ended: a message header of version 2"), "{lines:?}");
}
