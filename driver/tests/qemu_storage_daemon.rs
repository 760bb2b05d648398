//! The front-end against a server that is not ours: Debian's qemu-storage-daemon.

use ringway_driver::{
    BlkQueue, Buffer, Completion, Data, Error, Indirect, Options, Piece, Refusal, SchedulerMode,
    Status,
};
use ringway_testkit::{Need, skip};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const SECOND: Option<Duration> = Some(Duration::from_secs(20));

/// A running qemu-storage-daemon; killed when dropped.
struct Server {
    child: Child,
    socket: PathBuf,
    image: PathBuf,
    _dir: tempfile::TempDir,
}

impl Server {
    /// Serves 64 MiB of nothing (`null`) or of a sparse file. `None` if the machine has no
    /// qemu-storage-daemon.
    fn start(null: bool, queues: u16) -> Option<Self> {
        let found = Command::new("qemu-storage-daemon").arg("--version").output();
        if !found.is_ok_and(|out| out.status.success()) {
            skip(Need::StorageDaemon, "apt install qemu-system-common");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let (socket, image) = (dir.path().join("s"), dir.path().join("disk.raw"));
        std::fs::File::create(&image).unwrap().set_len(64 * MIB).unwrap();
        let blockdev = if null {
            "driver=null-co,node-name=disk,size=67108864,read-zeroes=on".to_owned()
        } else {
            format!("driver=file,node-name=disk,discard=unmap,filename={}", image.display())
        };
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues},\
             addr.type=unix,addr.path={}",
            socket.display()
        );
        let child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &blockdev, "--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { child, socket, image, _dir: dir })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options() -> Options {
    Options::new().patience(Duration::from_secs(10)).memory(16 << 20)
}

/// Content as a function of disk, sector and sequence number, so that a stale, misplaced or torn
/// sector is recognised.
fn fill(data: &mut [u8], disk: u64, offset: u64, sequence: u64) {
    for (i, sector) in data.chunks_mut(512).enumerate() {
        let number = offset / 512 + i as u64;
        for (j, word) in sector.chunks_mut(8).enumerate() {
            let mixed = (disk << 56 ^ sequence << 40 ^ number << 6 ^ j as u64)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(23)
                .wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word.copy_from_slice(&mixed.to_le_bytes());
        }
    }
}

fn check(data: &[u8], disk: u64, offset: u64, sequence: u64) {
    let mut want = vec![0; data.len()];
    fill(&mut want, disk, offset, sequence);
    for (i, (have, want)) in data.chunks(512).zip(want.chunks(512)).enumerate() {
        assert!(have == want, "sector {} has the wrong content", offset / 512 + i as u64);
    }
}

/// Waits for exactly one completion.
fn one<C>(queue: &mut BlkQueue<C>) -> Completion<C> {
    assert!(queue.wait(SECOND).unwrap(), "nothing came back in time");
    queue.pop().unwrap().expect("wait promised a completion")
}

fn read(queue: &mut BlkQueue<u64>, offset: u64, buffer: Buffer) -> Buffer {
    queue.read(offset, buffer, offset).unwrap();
    let done = one(queue);
    assert_eq!((done.ctx, done.status), (offset, Status::Ok));
    done.into_buffer().unwrap()
}

#[test]
fn every_operation_on_a_file_with_verified_content() {
    let shapes = [
        (Indirect::WhenScarce, true, false, 0),
        (Indirect::Never, false, true, 65500),
        (Indirect::Always, true, false, 65535),
        (Indirect::Always, false, true, 7),
    ];
    let Some(server) = Server::start(false, 1) else { return };
    for (disk, (indirect, event_idx, one_table, first)) in (1u64..).zip(shapes) {
        let options = options().indirect(indirect).event_idx(event_idx).one_table(one_table);
        let mut device = options.regions(3).first_index(first).connect(&server.socket).unwrap();
        assert_eq!(device.capacity(), 64 * MIB);
        let pool = device.pool();
        let mut queue = device.queue::<u64>().unwrap();
        let free = pool.available();

        for (sequence, len) in [(1u64, 512u64), (2, 4096), (3, 65536), (4, MIB)] {
            let mut buffer = pool.alloc(usize::try_from(len).unwrap()).unwrap();
            fill(&mut buffer, disk, len, sequence);
            queue.write(len, buffer, sequence).unwrap();
            let done = one(&mut queue);
            assert_eq!((done.ctx, done.status, done.used_len), (sequence, Status::Ok, 1));
            let mut buffer = done.into_buffer().unwrap();
            buffer.fill(0xee);
            let buffer = read(&mut queue, len, buffer);
            check(&buffer, disk, len, sequence);
        }

        // Vectored, cut at odd places, over the seams of the regions.
        let mut whole = pool.alloc(4 * 1024 * 1024).unwrap();
        fill(&mut whole, disk, 8 * MIB, 9);
        let (a, b) = whole.split_at(1_500_001);
        let (b, c) = b.split_at(1_500_001);
        queue.write_vectored(8 * MIB, vec![a, b, c], 9).unwrap();
        let done = one(&mut queue);
        assert_eq!(done.status, Status::Ok);
        let mut parts = done.data.into_buffers();
        parts.iter_mut().for_each(|part| part.fill(0));
        queue.read_vectored(8 * MIB, parts, 10).unwrap();
        let done = one(&mut queue);
        assert_eq!((done.status, done.used_len), (Status::Ok, 4 * 1024 * 1024 + 1));
        let joined: Vec<u8> = done.data.into_buffers().iter().flat_map(|b| b.to_vec()).collect();
        check(&joined, disk, 8 * MIB, 9);

        queue.flush(0).unwrap();
        assert_eq!(one(&mut queue).status, Status::Ok);
        queue.discard(8 * MIB, MIB, 0).unwrap();
        assert_eq!(one(&mut queue).status, Status::Ok);
        queue.write_zeroes(9 * MIB, MIB, disk % 2 == 0, 0).unwrap();
        assert_eq!(one(&mut queue).status, Status::Ok);
        let buffer = read(&mut queue, 9 * MIB, pool.alloc(1 << 20).unwrap());
        assert!(buffer.iter().all(|&byte| byte == 0));
        let buffer = read(&mut queue, 10 * MIB, buffer);
        check(&buffer, disk, 10 * MIB, 9);
        drop(buffer);

        queue.get_id(pool.alloc(20).unwrap(), 77).unwrap();
        let done = one(&mut queue);
        assert_eq!((done.ctx, done.status), (77, Status::Ok));
        assert_ne!(done.into_buffer().unwrap()[..], [0; 20]);

        // Beyond the end: the server refuses, the queue goes on.
        queue.read(64 * MIB, pool.alloc(512).unwrap(), 0).unwrap();
        assert_eq!(one(&mut queue).status, Status::IoError);

        odd_layouts(&mut queue, &pool, disk);
        assert_eq!(pool.available(), free, "every buffer came back");
        device.stop().unwrap();
    }
    assert_eq!(std::fs::metadata(&server.image).unwrap().len(), 64 * MIB);
}

/// A header of 1 + 15 bytes and the status at the end of the data buffer.
fn odd_layouts(queue: &mut BlkQueue<u64>, pool: &ringway_driver::BufferPool, disk: u64) {
    let mut header = pool.alloc(16).unwrap();
    header.fill(0);
    header[8..16].copy_from_slice(&(10 * MIB / 512).to_le_bytes());
    let mut data = pool.alloc(4097).unwrap();
    data.fill(0xff);
    let at = header.guest_address();
    let readable = [Piece { addr: at, len: 1 }, Piece { addr: at + 1, len: 15 }];
    let writable = [Piece { addr: data.guest_address(), len: 4097 }];
    // SAFETY: header and data live until the completion below.
    unsafe { queue.raw(&readable, &writable, &raw const data[4096], 5) }.unwrap();
    let done = one(queue);
    assert_eq!((done.ctx, done.status, done.used_len), (5, Status::Ok, 4097));
    check(&data[..4096], disk, 10 * MIB, 9);
}

#[test]
fn four_queues_in_four_threads_and_a_reconnect_under_way() {
    four_queues(SchedulerMode::Bio);
}

#[test]
fn four_queues_that_merge_and_a_reconnect_under_way() {
    four_queues(SchedulerMode::Request);
}

fn four_queues(path: SchedulerMode) {
    let Some(server) = Server::start(false, 4) else { return };
    let options = options().queues(0).first_index(65000).path(path).max_buffers(5);
    let mut device = options.connect(&server.socket).unwrap();
    assert_eq!((device.server_queues(), device.info().num_queues), (4, 4));
    let pool = device.pool();
    let mut queues = device.queues::<u64>().unwrap();
    assert!(matches!(device.queues::<u64>(), Err(Error::QueuesTaken)));
    for round in 0..3 {
        let threads: Vec<_> = (0u64..)
            .zip(queues)
            .map(|(index, queue)| {
                let pool = pool.clone();
                std::thread::spawn(move || write_then_verify(queue, &pool, index, round))
            })
            .collect();
        queues = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        device.stop().unwrap();
        assert!(!device.is_connected());
        assert!(matches!(device.refresh(), Err(Error::NotConnected)));
        // What is queued while no server is there is done after the reconnect.
        queues[0].flush(1234).unwrap();
        queues[0].submit().unwrap();
        assert!(matches!(queues[0].wait(SECOND), Err(Error::NotConnected)));
        device.reconnect().unwrap();
        let done = one(&mut queues[0]);
        assert_eq!((done.ctx, done.status), (1234, Status::Ok));
    }
    assert!(queues.iter().all(|queue| queue.in_flight() == 0 && queue.is_connected()));
    let merges = |queue: &BlkQueue<u64>| queue.stats().path.merged > 1000;
    assert!(queues.iter().all(|queue| merges(queue) == (path == SchedulerMode::Request)));
}

/// Keeps 16 writes in flight in the queue's own quarter of the disk, then reads all of it back.
fn write_then_verify(
    mut queue: BlkQueue<u64>,
    pool: &ringway_driver::BufferPool,
    index: u64,
    round: u64,
) -> BlkQueue<u64> {
    const LEN: u64 = 8192;
    let offset = |block: u64| index * 16 * MIB + block * LEN;
    let mut free: Vec<_> = (0..16).map(|_| pool.alloc(8192).unwrap()).collect();
    for verify in [false, true] {
        let (mut next, mut done) = (0, 0);
        while done < 600 {
            while next < 600 {
                let Some(mut buffer) = free.pop() else { break };
                if verify {
                    queue.read(offset(next), buffer, next).unwrap();
                } else {
                    fill(&mut buffer, index, offset(next), round);
                    queue.write(offset(next), buffer, next).unwrap();
                }
                next += 1;
            }
            if round == 1 {
                assert!(queue.wait_polling(SECOND).unwrap());
            } else {
                assert!(queue.wait_for(4, SECOND).unwrap());
            }
            for completion in queue.completions() {
                assert_eq!(completion.status, Status::Ok);
                let block = completion.ctx;
                let buffer = completion.into_buffer().unwrap();
                if verify {
                    check(&buffer, index, offset(block), round);
                }
                free.push(buffer);
                done += 1;
            }
        }
    }
    queue
}

#[test]
fn requests_that_cannot_be_are_refused_and_given_back() {
    let Some(server) = Server::start(true, 2) else { return };
    let error = options().queues(3).connect(&server.socket).unwrap_err();
    assert_eq!(error.to_string(), "3 queues were asked for but the server has 2: ask for fewer");
    let mut device =
        options().queue_size(8).indirect(Indirect::Never).connect(&server.socket).unwrap();
    let pool = device.pool();
    let mut queue = device.queue::<&str>().unwrap();
    let buffers = |count| -> Vec<_> { (0..count).map(|_| pool.alloc(512).unwrap()).collect() };

    let rejected = queue.read(100, pool.alloc(512).unwrap(), "mine").unwrap_err();
    assert_eq!(rejected.why, Refusal::Misaligned { offset: 100, len: 512 });
    assert_eq!(rejected.ctx, "mine");
    assert!(rejected.data.into_buffer().is_some());
    let rejected = queue.write(0, pool.alloc(511).unwrap(), "").unwrap_err();
    assert_eq!(rejected.why, Refusal::Misaligned { offset: 0, len: 511 });
    let rejected = queue.read_vectored(0, buffers(7), "").unwrap_err();
    assert_eq!(rejected.why, Refusal::TooManySegments { have: 7, max: 6 });
    assert_eq!(
        rejected.to_string(),
        "7 segments in one request, but this device takes 6: use several requests"
    );
    let rejected = queue.read_vectored(0, Vec::new(), "").unwrap_err();
    assert_eq!(rejected.why, Refusal::Empty);
    let rejected = queue.discard(0, 1 << 50, "").unwrap_err();
    assert!(matches!(rejected.why, Refusal::EraseTooLong { .. }), "{rejected}");
    // qemu-storage-daemon serves one client at a time and lets others wait.
    let second = options().timeout(Duration::from_millis(300)).connect(&server.socket);
    assert!(matches!(second, Err(Error::Silent { .. })), "{second:?}");

    // A full queue: everything comes back, and the queue is usable afterwards.
    queue.read_vectored(0, buffers(6), "all of it").unwrap();
    let rejected = queue.read(0, pool.alloc(512).unwrap(), "one more").unwrap_err();
    assert_eq!((rejected.why, rejected.ctx), (Refusal::Full, "one more"));
    let done = one(&mut queue);
    assert!(matches!(done.data, Data::Many(ref buffers) if buffers.len() == 6));
    assert!(!queue.wait(None).unwrap(), "nothing in flight: no sleep without end");
}

#[test]
fn a_server_that_dies_is_noticed_by_sleepers_and_pollers() {
    let Some(mut server) = Server::start(true, 2) else { return };
    let mut device = options().queues(2).connect(&server.socket).unwrap();
    let pool = device.pool();
    let mut queues = device.queues::<u8>().unwrap();
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    for (queue, polling) in queues.iter_mut().zip([false, true]) {
        queue.read(0, pool.alloc(512).unwrap(), 3).unwrap();
        let result = if polling { queue.wait_polling(None) } else { queue.wait(None) };
        assert!(matches!(result, Err(Error::NotConnected)), "{result:?}");
    }
    assert!(!device.is_connected());
    assert!(matches!(device.refresh(), Err(Error::Disconnected { .. })));
    assert!(device.stop().is_err());
    assert!(matches!(device.reconnect(), Err(Error::NotStopped)));
    assert_eq!(queues.remove(0).abandon(), [3]);
    let error = options().patience(Duration::ZERO).connect(&server.socket).unwrap_err();
    assert!(error.to_string().starts_with("no one listens at"), "{error}");
}
