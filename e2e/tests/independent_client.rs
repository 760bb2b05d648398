//! A client that shares no line with us: libblkio's Rust core, driver "virtio-blk-vhost-user",
//! against the program as users start it and against the back-end in this process.

use blkio::{Blkio, Blkioq, Completion, Errno, MemoryRegion, ReqFlags, iovec};
use ringway_disk::{CacheMode, EngineKind};
use ringway_e2e::guest::{Daemon, Serve};
use ringway_testkit::pattern;
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Need, skip};
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

const MIB: usize = 1 << 20;
const CAPACITY: usize = 16 * MIB;
const QUEUES: u16 = 4;
/// The number of the disk in the content of its sectors.
const DISK: u64 = 9;
const PATIENCE: Duration = Duration::from_secs(20);

/// Somebody who serves an image at a socket.
enum Server {
    Rig(Box<Rig>),
    Daemon(Daemon),
}

struct Scene {
    server: Server,
    image: PathBuf,
    socket: PathBuf,
    _folder: TempDir,
}

impl Scene {
    fn new(daemon: bool, engine: EngineKind, cache: CacheMode, read_only: bool) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        let image = image(folder.path(), CAPACITY as u64);
        let socket = folder.path().join("v.sock");
        let server = if daemon {
            let mut serve = Serve::new(&image, &socket).queues(QUEUES);
            for (option, word) in [("--engine", engine.name()), ("--cache", cache.name())] {
                serve = serve.arg(option).arg(word);
            }
            let serve = if read_only { serve.read_only() } else { serve };
            Server::Daemon(Daemon::serve(&serve).expect("ringway serves"))
        } else {
            let mut options = RigOptions::buffered(&image, engine).queues(QUEUES, 2);
            options.disk.cache = Some(cache);
            options.disk.read_only = read_only;
            Server::Rig(Box::new(Rig::start(&options)))
        };
        Self { server, image, socket, _folder: folder }
    }

    fn client(&mut self, queues: u16, read_only: bool) -> Client {
        if let Server::Rig(rig) = &mut self.server {
            // One connection each.
            let _ = std::fs::remove_file(&self.socket);
            rig.listen(&self.socket);
        }
        Client::new(&self.socket, queues, 0, read_only).unwrap_or_else(|error| panic!("{error}"))
    }

    fn allocated(&self) -> u64 {
        self.image.metadata().expect("the image").blocks() * 512
    }

    fn found(&self) -> Vec<u8> {
        std::fs::read(&self.image).expect("the image")
    }

    /// The daemon ends as it should.
    fn end(self) {
        if let Server::Daemon(daemon) = self.server {
            daemon.stop().expect("a clean end");
        }
    }
}

/// Calls `test` with every server: the program and the rig, buffered and with O_DIRECT.
fn with_servers(read_only: bool, test: impl Fn(&mut Scene, &str)) {
    for daemon in [false, true] {
        for (engine, cache) in servers() {
            let what = format!("{engine}, {cache}, the program: {daemon}");
            let mut scene = Scene::new(daemon, engine, cache, read_only);
            test(&mut scene, &what);
            scene.end();
        }
    }
}

fn servers() -> Vec<(EngineKind, CacheMode)> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = image(folder.path(), MIB as u64);
    let mut options = ringway_disk::OpenOptions::new(ringway_disk::Source::Path(path));
    let usable = ringway_export::usable_engines();
    options.cache = Some(CacheMode::None);
    let direct = ringway_disk::open(&options).map(drop);
    let wanted = [
        (EngineKind::IoUring, CacheMode::None),
        (EngineKind::IoUring, CacheMode::Writeback),
        (EngineKind::Threads, CacheMode::Writeback),
        (EngineKind::Threads, CacheMode::Writethrough),
    ];
    let works = |&(engine, cache): &(EngineKind, CacheMode)| {
        let engine_works = usable.iter().find(|(kind, _)| *kind == engine).map(|(_, works)| works);
        match (engine_works, &direct) {
            (Some(Err(why)), _) => skip(Need::IoUring, why),
            (_, Err(why)) if cache == CacheMode::None => skip(Need::Direct, why),
            _ => return true,
        }
        false
    };
    wanted.into_iter().filter(works).collect()
}

/// A connected client with memory of its own. The queues go first.
struct Client {
    queues: Vec<Blkioq>,
    memory: Memory,
    blkio: Blkio,
}

/// Shared memory, addressed by offset. A part belongs to whoever was told its offset.
#[derive(Clone, Copy)]
struct Memory {
    region: MemoryRegion,
}

impl Memory {
    fn at(self, offset: usize) -> *mut u8 {
        assert!(offset < self.region.len);
        (self.region.addr as *mut u8).wrapping_add(offset)
    }

    fn bytes(&mut self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= self.region.len);
        // SAFETY: the region is mapped as long as the client; nothing is in flight on a part that is
        // looked at, and each part has one user.
        unsafe { std::slice::from_raw_parts_mut(self.at(offset), len) }
    }
}

impl Client {
    fn new(socket: &Path, queues: u16, polled: u16, read_only: bool) -> blkio::Result<Self> {
        let mut blkio = Blkio::new("virtio-blk-vhost-user")?;
        blkio.set_str("path", socket.to_str().expect("a plain path"))?;
        blkio.set_bool("read-only", read_only)?;
        blkio.connect()?;
        blkio.set_i32("num-queues", queues.into())?;
        blkio.set_i32("num-poll-queues", polled.into())?;
        blkio.set_i32("queue-size", 128)?;
        let mut started = blkio.start()?;
        let region = blkio.alloc_mem_region(16 * MIB)?;
        blkio.map_mem_region(&region)?;
        started.queues.append(&mut started.poll_queues);
        Ok(Self { queues: started.queues, memory: Memory { region }, blkio })
    }
}

/// Waits for `count` completions: (user data, result) each.
fn wait(queue: &mut Blkioq, count: usize) -> Vec<(usize, i32)> {
    let mut completions: Vec<MaybeUninit<Completion>> =
        (0..count).map(|_| MaybeUninit::uninit()).collect();
    let mut patience = PATIENCE;
    let found = queue.do_io(&mut completions, count, Some(&mut patience), None);
    assert_eq!(found.unwrap_or_else(|error| panic!("a request hangs: {error}")), count);
    // SAFETY: `do_io` has filled in as many as it says.
    completions
        .iter()
        .map(|done| unsafe { done.assume_init_ref() })
        .map(|d| (d.user_data, d.ret))
        .collect()
}

#[track_caller]
fn ok(queue: &mut Blkioq) {
    assert_eq!(wait(queue, 1), [(1, 0)]);
}

const NO_FLAGS: ReqFlags = ReqFlags::empty();

fn write(queue: &mut Blkioq, memory: Memory, offset: u64, at: usize, len: usize) {
    queue.write(offset, memory.at(at), len, 1, NO_FLAGS);
    ok(queue);
}

fn read(queue: &mut Blkioq, memory: Memory, offset: u64, at: usize, len: usize) {
    queue.read(offset, memory.at(at), len, 1, NO_FLAGS);
    ok(queue);
}

#[test]
fn it_sees_the_disk_as_it_is() {
    with_servers(false, |scene, what| {
        let client = scene.client(1, false);
        let blkio = &client.blkio;
        assert_eq!(blkio.get_u64("capacity").unwrap(), CAPACITY as u64, "{what}");
        assert_eq!(blkio.get_i32("max-queues").unwrap(), i32::from(QUEUES));
        assert_eq!(blkio.get_i32("request-alignment").unwrap(), 512);
        assert_eq!(blkio.get_i32("max-segment-len").unwrap(), 4 << 20);
        assert_eq!(blkio.get_i32("max-segments").unwrap(), 126);
        assert!(blkio.get_u64("max-write-zeroes-len").unwrap() >= 1 << 30);
        assert!(blkio.get_u64("max-mem-regions").unwrap() >= 8);
        let through = what.contains("writethrough");
        assert_eq!(blkio.get_bool("flush-needed").unwrap(), !through, "{what}");
    });
}

#[test]
fn it_reads_what_it_wrote() {
    with_servers(false, |scene, what| {
        let Client { queues, mut memory, blkio: _blkio } = scene.client(1, false);
        let queue = &mut { queues }[0];
        let mut model = vec![0; CAPACITY];
        let mut sequence = 0;
        for (len, sector) in
            [(512, 0), (512, 7), (4096, 8), (12800, 33), (65536, 100), (MIB, 513), (4 * MIB, 8192)]
        {
            for shift in [0, 512, 1] {
                sequence += 1;
                let at = 4096 + shift;
                pattern::fill(memory.bytes(at, len), DISK, sector, sequence);
                let from = usize::try_from(sector * 512).unwrap();
                model[from..from + len].copy_from_slice(memory.bytes(at, len));
                write(queue, memory, sector * 512, at, len);
                memory.bytes(at, len).fill(0xdd);
                read(queue, memory, sector * 512, 8 * MIB, len);
                let found = memory.bytes(8 * MIB, len);
                assert_eq!(
                    pattern::first_difference(found, DISK, sector, sequence),
                    None,
                    "{what}"
                );
            }
        }
        // Lists of buffers that end anywhere.
        for lens in [&[512, 1024][..], &[1, 511], &[700, 4096, 300, 536], &[512; 126]] {
            sequence += 1;
            let mut bytes = vec![0; lens.iter().sum()];
            pattern::fill(&mut bytes, DISK, 21, sequence);
            let (mut list, mut at, mut done) = (Vec::new(), 100, 0);
            for &len in lens {
                memory.bytes(at, len).copy_from_slice(&bytes[done..done + len]);
                list.push(iovec { iov_base: memory.at(at).cast(), iov_len: len });
                (at, done) = (at + len + 33, done + len);
            }
            let count = u32::try_from(list.len()).unwrap();
            queue.writev(21 * 512, list.as_ptr(), count, 1, NO_FLAGS);
            ok(queue);
            model[21 * 512..][..bytes.len()].copy_from_slice(&bytes);
            memory.bytes(0, 4 * MIB).fill(0xdd);
            queue.readv(21 * 512, list.as_ptr(), count, 1, NO_FLAGS);
            ok(queue);
            let (mut at, mut done) = (100, 0);
            for &len in lens {
                assert!(*memory.bytes(at, len) == bytes[done..done + len], "{what}: {lens:?}");
                (at, done) = (at + len + 33, done + len);
            }
        }
        queue.flush(1, NO_FLAGS);
        ok(queue);
        assert!(scene.found() == model, "{what}: the image");
        // Nothing lies beyond the end.
        queue.read(CAPACITY as u64, memory.at(0), 512, 1, NO_FLAGS);
        let (_, result) = wait(queue, 1)[0];
        assert!(result < 0, "{what}: {result}");
    });
}

#[test]
fn it_discards_and_writes_zeroes() {
    with_servers(false, |scene, what| {
        let Client { queues, mut memory, blkio } = scene.client(1, false);
        let queue = &mut { queues }[0];
        pattern::fill(memory.bytes(0, 4 * MIB), DISK, 0, 1);
        for at in (0..4 * MIB).step_by(MIB) {
            queue.write(at as u64, memory.at(at), MIB, 1, ReqFlags::FUA);
            ok(queue);
        }
        let frees = blkio.get_u64("max-discard-len").unwrap() > 0;
        let full = scene.allocated();
        assert!(full >= 4 * MIB as u64);

        queue.write_zeroes(512, 1024, 1, ReqFlags::NO_UNMAP);
        ok(queue);
        queue.write_zeroes(MIB as u64, MIB as u64, 1, ReqFlags::NO_UNMAP);
        ok(queue);
        assert!(scene.allocated() >= full, "{what}: NO_UNMAP keeps the space");
        queue.write_zeroes(2 * MIB as u64, MIB as u64, 1, NO_FLAGS);
        ok(queue);
        let unmapped = scene.allocated();
        if frees {
            assert!(unmapped + (MIB as u64) <= full, "{what}: {full} to {unmapped}");
            queue.discard(3 * MIB as u64, MIB as u64, 1, NO_FLAGS);
            ok(queue);
            assert!(scene.allocated() + (MIB as u64) <= unmapped, "{what}");
        } else {
            skip(Need::Holes, "the file system of the temporary folder");
        }
        queue.flush(1, NO_FLAGS);
        ok(queue);

        memory.bytes(8 * MIB, 4 * MIB).fill(0xdd);
        read(queue, memory, 0, 8 * MIB, 3 * MIB);
        for (sector, bytes) in (0..).zip(memory.bytes(8 * MIB, 3 * MIB).chunks(512)) {
            let zeroed = (1..3).contains(&sector) || sector >= 2048;
            let right = match zeroed {
                true => bytes.iter().all(|&byte| byte == 0),
                false => pattern::first_difference(bytes, DISK, sector, 1).is_none(),
            };
            assert!(right, "{what}: sector {sector}");
        }
    });
}

/// Four queues, four threads, full rings; half of the queues are polled.
#[test]
fn it_uses_all_queues() {
    with_servers(false, |scene, what| {
        let client = match &mut scene.server {
            Server::Rig(_) => scene.client(QUEUES, false),
            Server::Daemon(_) => Client::new(&scene.socket, 2, 2, false).unwrap(),
        };
        let Client { queues, memory, blkio: _blkio } = client;
        assert_eq!(queues.len(), usize::from(QUEUES));
        const BLOCKS: usize = 32;
        std::thread::scope(|scope| {
            for (number, mut queue) in queues.into_iter().enumerate() {
                let mut memory = memory;
                scope.spawn(move || {
                    // Queue n has every fourth block of the disk and its own part of the memory.
                    let block = |i: usize| (i * usize::from(QUEUES) + number) * 4096;
                    let part = |i: usize| number * 2 * MIB + i * 4096;
                    for sequence in 1..=20 {
                        for i in 0..BLOCKS {
                            let sector = (block(i) / 512) as u64;
                            pattern::fill(memory.bytes(part(i), 4096), DISK, sector, sequence);
                            queue.write(block(i) as u64, memory.at(part(i)), 4096, i, NO_FLAGS);
                        }
                        let mut done = wait(&mut queue, BLOCKS);
                        done.sort_unstable();
                        assert_eq!(done, (0..BLOCKS).map(|i| (i, 0)).collect::<Vec<_>>());
                        for i in 0..BLOCKS {
                            memory.bytes(part(i), 4096).fill(0xdd);
                            queue.read(block(i) as u64, memory.at(part(i)), 4096, i, NO_FLAGS);
                        }
                        assert!(wait(&mut queue, BLOCKS).iter().all(|&(_, result)| result == 0));
                        for i in 0..BLOCKS {
                            let (bytes, sector) = (memory.bytes(part(i), 4096), block(i) / 512);
                            let wrong =
                                pattern::first_difference(bytes, DISK, sector as u64, sequence);
                            assert_eq!(wrong, None, "queue {number}");
                        }
                    }
                    queue.flush(1, NO_FLAGS);
                    ok(&mut queue);
                });
            }
        });
        let found = scene.found();
        let all = &found[..BLOCKS * usize::from(QUEUES) * 4096];
        assert_eq!(pattern::first_difference(all, DISK, 0, 20), None, "{what}");
        if let Server::Rig(rig) = &scene.server {
            assert!(rig.stats().iter().all(|worker| worker.requests > 0), "no worker is idle");
        }
    });
}

#[test]
fn it_cannot_write_a_read_only_disk() {
    with_servers(true, |scene, what| {
        if let Server::Rig(rig) = &mut scene.server {
            rig.listen(&scene.socket);
        }
        let refused = Client::new(&scene.socket, 1, 0, false).map(drop).unwrap_err();
        assert_eq!(refused.errno(), Errno::ROFS, "{what}: {refused}");
        let Client { queues, mut memory, blkio } = scene.client(1, true);
        let queue = &mut { queues }[0];
        assert_eq!(blkio.get_u64("max-discard-len").unwrap(), 0);
        memory.bytes(0, 4096).fill(0xdd);
        read(queue, memory, 0, 0, 4096);
        assert!(memory.bytes(0, 4096).iter().all(|&byte| byte == 0));
        queue.write(0, memory.at(0), 512, 1, NO_FLAGS);
        assert_eq!(wait(queue, 1), [(1, -libc::EBADF)]);
        assert!(scene.found() == vec![0; CAPACITY], "{what}");
    });
}

/// Memory that comes and goes while the queues run, and clients that come and go.
#[test]
fn it_maps_and_unmaps_and_comes_back() {
    with_servers(false, |scene, what| {
        for sequence in 1..=3 {
            let Client { queues, memory, mut blkio } = scene.client(2, false);
            let mut queues = queues;
            for round in 0..4u64 {
                let region = blkio.alloc_mem_region(MIB).unwrap();
                blkio.map_mem_region(&region).unwrap();
                let mut more = Memory { region };
                let sector = round * 64;
                pattern::fill(more.bytes(0, 8192), DISK, sector, sequence);
                write(&mut queues[0], more, sector * 512, 0, 8192);
                read(&mut queues[1], more, sector * 512, 16384, 8192);
                let found = more.bytes(16384, 8192);
                assert_eq!(
                    pattern::first_difference(found, DISK, sector, sequence),
                    None,
                    "{what}"
                );
                blkio.unmap_mem_region(&region);
                blkio.free_mem_region(&region);
            }
            read(&mut queues[0], memory, 0, 0, 512);
        }
    });
}
