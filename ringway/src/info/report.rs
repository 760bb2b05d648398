//! The report: the facts, and how people read them.

use super::chain::{self, Link};
use super::elsewhere;
use super::image::Facts;
use super::server::{Feature, Process, Served};
use crate::doctor::report::{Grade, ReportLine, disk, lay_out, line, ok_if, width};
use ringway_control::size::Size;
use serde::Serialize;

/// All that was found. The names of the fields are the keys of the JSON and stay as they are.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Info {
    Served(Box<Served>),
    Chain { chain: Vec<Link> },
    Elsewhere(Box<elsewhere::Facts>),
    Image(Box<Facts>),
}

/// The whole report; wrapped on a terminal, a line each otherwise.
pub(super) fn write(info: &Info) -> String {
    let sections = match info {
        Info::Served(served) => self::served(served),
        Info::Chain { chain } => chain::sections(chain),
        Info::Elsewhere(facts) => vec![elsewhere(facts)],
        Info::Image(facts) => image(facts),
    };
    lay_out(&sections, width())
}

fn fact(name: &str, value: impl Into<String>) -> ReportLine {
    line(Grade::Fact, name, value)
}

fn served(served: &Served) -> Vec<(String, Vec<ReportLine>)> {
    let mut what = vec![
        fact("size", format!("{} ({})", Size(served.bytes), served.bytes)),
        fact("serial", served.serial.as_deref().unwrap_or("none")),
        fact("access", if served.read_only { "read-only" } else { "reading and writing" }),
    ];
    let flush = if served.flush { "flushes make writes durable" } else { "no flush" };
    what.push(fact("write cache", format!("{}, {flush}", served.write_cache)));
    let blocks = &served.blocks;
    let size = |bytes: u32| {
        if bytes == 0 { "not known".to_owned() } else { Size(bytes.into()).to_string() }
    };
    what.push(fact(
        "blocks",
        format!("{} logical, {} physical", size(blocks.logical), size(blocks.physical)),
    ));
    what.push(fact(
        "requests",
        format!("at least {}, best {}", size(blocks.min_io), size(blocks.optimal_io)),
    ));
    if let Some((cylinders, heads, sectors)) = blocks.geometry {
        let text = format!("{cylinders} cylinders, {heads} heads, {sectors} sectors");
        what.push(fact("geometry", text));
    }
    let queues = &served.queues;
    let limits = &served.limits;
    let count = |limit: Option<u32>| limit.map_or("no limit".to_owned(), |n| n.to_string());
    let bytes = |limit: Option<u64>| limit.map_or("not offered".into(), |n| Size(n).to_string());
    let segment = limits.segment_bytes.map_or("no limit".into(), |n| Size(n.into()).to_string());
    let unmap = if limits.write_zeroes_may_unmap { ", may free space" } else { "" };
    let bounds = vec![
        fact("queues", format!("{} (the server has {})", queues.disk, queues.server)),
        fact("segments", count(limits.segments)),
        fact("of a segment", segment),
        fact("discard", bytes(limits.discard_bytes)),
        fact("write zeroes", format!("{}{unmap}", bytes(limits.write_zeroes_bytes))),
    ];
    let mut sections = vec![
        (format!("Disk {}", served.target), what),
        ("Limits".to_owned(), bounds),
        ("virtio features (ok: in use here)".to_owned(), features(&served.virtio_features)),
        ("vhost-user features (ok: in use here)".to_owned(), features(&served.vhost_user_features)),
    ];
    if let Some(process) = &served.server {
        sections.push(("Server".to_owned(), server(process)));
    }
    sections
}

fn elsewhere(facts: &elsewhere::Facts) -> (String, Vec<ReportLine>) {
    let mut lines = vec![
        fact("kind", facts.kind),
        fact("size", format!("{} ({})", Size(facts.bytes), facts.bytes)),
        fact("access", if facts.read_only { "read-only" } else { "reading and writing" }),
    ];
    if let Some(export) = &facts.nbd {
        let size = |bytes: u32| Size(bytes.into());
        let (least, best) = (size(export.min_block), size(export.preferred_block));
        let most = size(export.max_block);
        lines.push(fact("requests", format!("at least {least}, best {best}, at most {most}")));
        lines.push(fact("server offers", export.abilities.join(" ")));
        let replies = if export.structured_replies { "structured" } else { "simple" };
        lines.push(fact("replies", replies));
        if let Some(bytes) = export.data_bytes {
            lines.push(fact("data", format!("{} ({bytes}); the rest is zeroes", Size(bytes))));
        }
    }
    if let Some(image) = &facts.rbd {
        lines.push(fact("objects", format!("{} each", Size(image.object_bytes))));
        lines.push(fact("features", image.features.join(" ")));
        let lock = image.lock.as_ref().map_or("nobody has it".to_owned(), |lock| {
            let lives = if lock.lives { "lives" } else { "has not been heard of lately" };
            format!("{}, which {lives}", lock.address)
        });
        lines.push(fact("exclusive lock", lock));
        if let Some(why) = &image.not_writable {
            lines.push(line(Grade::Warn, "for writing", why.clone()));
        }
    }
    (format!("Disk {}", facts.target), lines)
}

fn features(features: &[Feature]) -> Vec<ReportLine> {
    let mut lines = Vec::new();
    for (used, mark, name) in [(true, Grade::Ok, "used"), (false, Grade::Fact, "unused")] {
        let these = features.iter().filter(|feature| feature.used == used);
        let names: Vec<_> = these
            .map(|Feature { bit, name, .. }| {
                name.map_or_else(|| format!("bit {bit}"), |name| name.to_owned())
            })
            .collect();
        if !names.is_empty() {
            lines.push(line(mark, name, names.join(" ")));
        }
    }
    lines
}

fn server(process: &Process) -> Vec<ReportLine> {
    let size = |bytes: Option<u64>| bytes.map_or("not known".into(), |n| Size(n).to_string());
    let threads = process.threads.map_or(String::new(), |n| format!(", {n} threads"));
    vec![
        fact("process", format!("{} ({}){threads}", process.pid, process.name)),
        fact(
            "memory",
            format!(
                "{} resident: {} its own, {} shared; {} locked",
                size(process.resident_bytes),
                size(process.anonymous_bytes),
                size(process.shared_bytes),
                size(process.locked_bytes)
            ),
        ),
    ]
}

fn image(facts: &Facts) -> Vec<(String, Vec<ReportLine>)> {
    let mut lines = disk(&facts.image);
    if let Some(extents) = &facts.extents {
        let more = if extents.complete { "" } else { ", and more behind" };
        let text = format!(
            "{} of data ({}), {} of holes{more}",
            extents.data,
            Size(extents.data_bytes),
            Size(extents.hole_bytes)
        );
        lines.push(fact("extents", text));
    }
    if let Some(memory) = &facts.memory {
        let dirty = format!("{} not written yet", Size(memory.dirty_bytes));
        lines.push(fact("page cache", format!("{}, {dirty}", Size(memory.cached_bytes))));
    }
    if let Some(error) = &facts.image.error {
        lines.push(line(ok_if(false, Grade::No), "not servable", error.clone()));
    }
    if let Some(error) = &facts.chain_error {
        lines.push(line(Grade::Warn, "as qcow2", error.clone()));
    }
    let mut sections = vec![(format!("Disk {}", facts.target), lines)];
    sections.extend(facts.chain.iter().flat_map(|chain| chain::sections(chain)));
    sections
}
