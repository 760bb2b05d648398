//! Guests of qcow2 images.

use crate::scene::{PATIENCE, Queue, Scene, works};
use ringway_disk::{CacheMode, EngineKind, Qcow2, Source};
use ringway_driver::Options;
use ringway_testkit::{Need, skip};
use std::path::Path;
use std::process::Command;

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads];
const BYTES: u64 = 4 << 20;

/// Serves the image anew and writes a cluster's first sectors, once, as the only request there is.
fn write_once(path: &Path, engine: EngineKind, content: u8) {
    let front = Options::new().queues(1).queue_size(128);
    let mut scene = Scene::with(BYTES, &front, |rig| {
        rig.disk.source = Source::Path(path.into());
        rig.disk.qcow2 = Some(Qcow2::default());
        rig.disk.engine = Some(engine);
        rig.disk.cache = Some(CacheMode::Writeback);
    });
    let mut queue: Queue = scene.device.queues().expect("not taken yet").remove(0);
    let mut buffer = scene.device.pool().alloc(4096).expect("shared memory");
    buffer.fill(content);
    queue.write(0, buffer, 1).unwrap_or_else(|error| panic!("{error}"));
    assert!(queue.wait(Some(PATIENCE)).expect("connected"), "{engine}: slept over a write");
    assert!(queue.completions().all(|done| done.is_ok()));
}

/// Where a cluster is, the image's thread finds out; the write that waited for it is begun when the worker
/// is about to sleep. Nothing else wakes it here: no other request, and no watchdog.
#[test]
fn c08_what_an_image_answers_is_not_slept_over() {
    // In memory: there io_uring has the worker write.
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let path = folder.path().join("disk.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&path)
        .arg(BYTES.to_string())
        .status();
    if !made.is_ok_and(|status| status.success()) {
        return skip(Need::Qemu, "qemu-img".to_owned());
    }
    for engine in ENGINES.into_iter().filter(|engine| works(*engine, CacheMode::Writeback)) {
        write_once(&path, engine, 1);
        write_once(&path, engine, 2);
    }
}
