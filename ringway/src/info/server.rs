//! A served disk: what its server says in the handshake and the configuration space.

use crate::io::disk;
use ringway_bench::peer;
use ringway_driver::{Device, Options, vhost_user_feature_name, virtio_feature_name};
use ringway_image::printable;
use serde::Serialize;
use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

/// How long the server may take: one that has a front-end already answers when that has gone.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What a server says.
#[derive(Debug, Serialize)]
pub(super) struct Served {
    pub(super) target: String,
    pub(super) kind: &'static str,
    pub(super) bytes: u64,
    pub(super) serial: Option<String>,
    pub(super) read_only: bool,
    /// Flushes are understood.
    pub(super) flush: bool,
    /// `write back` or `write through`.
    pub(super) write_cache: &'static str,
    pub(super) queues: Queues,
    pub(super) blocks: Blocks,
    pub(super) limits: ServerLimits,
    pub(super) virtio_features: Vec<Feature>,
    pub(super) vhost_user_features: Vec<Feature>,
    /// `null` if the server runs where this process cannot see it.
    pub(super) server: Option<Process>,
}

/// Numbers of queues.
#[derive(Debug, Serialize)]
pub(super) struct Queues {
    /// By GET_QUEUE_NUM.
    pub(super) server: u16,
    /// By the configuration space.
    pub(super) disk: u16,
}

/// Sizes in bytes; 0 where the server does not say.
#[derive(Debug, Serialize)]
pub(super) struct Blocks {
    pub(super) logical: u32,
    pub(super) physical: u32,
    pub(super) min_io: u32,
    pub(super) optimal_io: u32,
    pub(super) discard_alignment: u32,
    /// Cylinders, heads, sectors.
    pub(super) geometry: Option<(u16, u8, u8)>,
}

/// The largest requests; `null` where there is no limit, or no such request.
#[derive(Debug, Serialize)]
pub(super) struct ServerLimits {
    pub(super) segments: Option<u32>,
    pub(super) segment_bytes: Option<u32>,
    pub(super) discard_bytes: Option<u64>,
    pub(super) write_zeroes_bytes: Option<u64>,
    pub(super) write_zeroes_may_unmap: bool,
}

/// A feature that the server has.
#[derive(Debug, Serialize)]
pub(super) struct Feature {
    pub(super) bit: u32,
    pub(super) name: Option<&'static str>,
    /// This program's front-end would use it.
    pub(super) used: bool,
}

/// The server's process.
#[derive(Debug, Serialize)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) threads: Option<u64>,
    /// Memory in use: all of it, its own, and shared with others (guests, say).
    pub(super) resident_bytes: Option<u64>,
    pub(super) anonymous_bytes: Option<u64>,
    pub(super) shared_bytes: Option<u64>,
    /// Memory that the kernel keeps in place for it.
    pub(super) locked_bytes: Option<u64>,
}

/// Connects, asks, and leaves again.
///
/// # Errors
/// No server, one that does not answer, or one that is none for disks.
pub(super) fn ask(socket: &Path) -> anyhow::Result<Served> {
    let options = Options::new().timeout(TIMEOUT).memory(1 << 20).queue_size(16);
    let stream = peer::connect(socket)?;
    let pid = peer::server(&stream);
    let mut device = options.over(stream)?;
    let mut queue = device.queue::<()>()?;
    let serial = disk::serial(&mut queue, &device.pool(), ())?;
    let served = describe(socket, &device, serial, pid.and_then(process));
    device.stop()?;
    Ok(served)
}

fn describe(
    socket: &Path,
    device: &Device,
    serial: Option<String>,
    server: Option<Process>,
) -> Served {
    let info = device.info();
    let erase = |sectors: Option<u32>| sectors.map(|sectors| u64::from(sectors) * 512);
    let (virtio, vhost_user) = device.offered();
    Served {
        target: format!("vhost-user:{}", printable(socket)),
        kind: "vhost-user",
        bytes: info.capacity,
        serial,
        read_only: info.read_only,
        flush: info.flush,
        write_cache: if info.writeback { "write back" } else { "write through" },
        queues: Queues { server: device.server_queues(), disk: info.num_queues },
        blocks: Blocks {
            logical: info.block_size,
            physical: info.physical_block,
            min_io: info.min_io,
            optimal_io: info.optimal_io,
            discard_alignment: info.discard_alignment,
            geometry: info.geometry,
        },
        limits: ServerLimits {
            segments: info.seg_max,
            segment_bytes: info.size_max,
            discard_bytes: erase(info.max_discard_sectors),
            write_zeroes_bytes: erase(info.max_write_zeroes_sectors),
            write_zeroes_may_unmap: info.write_zeroes_may_unmap,
        },
        virtio_features: features(virtio, device.features(), virtio_feature_name),
        vhost_user_features: features(
            vhost_user,
            device.protocol_features(),
            vhost_user_feature_name,
        ),
        server,
    }
}

fn features(offered: u64, used: u64, name: fn(u32) -> Option<&'static str>) -> Vec<Feature> {
    let bits = (0..64).filter(|bit| offered & (1 << bit) != 0);
    bits.map(|bit| Feature { bit, name: name(bit), used: used & (1 << bit) != 0 }).collect()
}

/// What /proc says of a process; `None` if that is not visible here.
fn process(pid: u32) -> Option<Process> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let lines: HashMap<_, _> = status.lines().filter_map(|line| line.split_once(':')).collect();
    let number = |key: &str| lines.get(key)?.split_whitespace().next()?.parse::<u64>().ok();
    let kib = |key: &str| number(key).map(|kib| kib << 10);
    Some(Process {
        pid,
        name: lines.get("Name")?.trim().to_owned(),
        threads: number("Threads"),
        resident_bytes: kib("VmRSS"),
        anonymous_bytes: kib("RssAnon"),
        shared_bytes: kib("RssShmem"),
        locked_bytes: kib("VmLck").zip(kib("VmPin")).map(|(locked, pinned)| locked + pinned),
    })
}
