//! A queue by itself: what its worker asks of it, with a driver written by hand.

use super::*;
use crate::iommu::Answered;
use ringway_core::mem::{GuestMap, Mapping, Permission, Region, Translation};
use ringway_export::{QueueLifecycle, SharedMemory};
use ringway_ring::virtqueue::{Areas, Format};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsRawFd, RawFd};

/// The guest's memory, from its address 0 on.
const BYTES: usize = 1 << 16;
const SIZE: u16 = 16;
// Where things lie in it: the areas of the ring, and the parts of a request.
const AVAIL: usize = 0x1000;
const USED: usize = 0x2000;
const HEADER: usize = 0x4000;
const DATA: usize = 0x5000;
const STATUS: usize = 0x6000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

struct Guest {
    mapping: Arc<Mapping>,
    offered: u16,
}

impl Guest {
    fn bell() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    /// A guest and its queue, which calls `call`.
    fn new(call: Option<Arc<PeerEventfd>>) -> (Self, Queue, RawFd) {
        let mapping = Arc::new(Mapping::anonymous(BYTES).unwrap());
        let region = Region { guest: 0, user: 0, len: BYTES as u64, mapping: Arc::clone(&mapping) };
        let map = Arc::new(GuestMap::new(vec![region]).unwrap());
        let format = Format { packed: false, size: SIZE, event_idx: false, indirect: false };
        let at = |offset| mapping.at(offset);
        let areas = Areas { desc: at(0), driver: at(AVAIL), device: at(USED) };
        let kick = Self::bell();
        let doorbell = kick.as_raw_fd();
        // SAFETY: the areas are in the map, far enough apart.
        let ring = unsafe { Queue::ring(format, areas, None, None) };
        let place = Arc::new(RingPlace::whole(areas));
        let queue = Queue::new(ring.unwrap(), map, place, None, kick, call);
        (Self { mapping, offered: 0 }, queue, doorbell)
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= BYTES);
        // SAFETY: within the mapping, which no other thread touches.
        unsafe { self.mapping.at(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        // SAFETY: as above.
        unsafe { self.mapping.at(at).cast::<[u8; N]>().read() }
    }

    fn describe(&self, index: usize, at: usize, len: u32, flags: u16, next: u16) {
        self.put(16 * index, &(at as u64).to_le_bytes());
        self.put(16 * index + 8, &len.to_le_bytes());
        self.put(16 * index + 12, &flags.to_le_bytes());
        self.put(16 * index + 14, &next.to_le_bytes());
    }

    fn offer(&mut self, head: u16) {
        let entry = usize::from(self.offered % SIZE);
        self.put(AVAIL + 4 + 2 * entry, &head.to_le_bytes());
        self.offered += 1;
        self.put(AVAIL + 2, &self.offered.to_le_bytes());
    }

    /// Offers a read of one sector: three descriptors.
    fn read(&mut self) {
        self.put(HEADER, &[0; 16]);
        self.describe(0, HEADER, 16, NEXT, 1);
        self.describe(1, DATA, 512, NEXT | WRITE, 2);
        self.describe(2, STATUS, 1, WRITE, 0);
        self.offer(0);
    }

    /// Where a byte of it is here.
    fn host(&self, at: usize) -> usize {
        self.mapping.at(at) as usize
    }
}

fn taken(queue: &mut Queue) -> Option<Token> {
    match queue.pop(&mut Request::with_capacity(8)).unwrap() {
        Pop::Request(token) => Some(token),
        Pop::Empty => None,
        Pop::Refused(..) => panic!("refused"),
    }
}

#[test]
fn a_request_is_work_until_it_is_taken() {
    let (mut guest, mut queue, doorbell) = Guest::new(None);
    assert_eq!((queue.doorbell(), queue.depth(), queue.backlog()), (doorbell, SIZE, 0));
    assert_eq!(queue.map().regions()[0].mapping.at(0), guest.mapping.at(0), "its memory");
    assert!(!queue.has_work() && taken(&mut queue).is_none());
    assert_eq!(queue.arm().unwrap(), Armed::Quiet);
    guest.read();
    assert!(queue.has_work());
    assert_eq!(queue.arm().unwrap(), Armed::WorkArrived);
    let token = taken(&mut queue).unwrap();
    assert_eq!(queue.effort(), 3, "a descriptor each for header, data and status");
    assert!(!queue.has_work());
    queue.complete(token, Status::Ok, 512);
    queue.publish().unwrap();
    assert_eq!(guest.get(USED + 2), 1u16.to_le_bytes());
    assert_eq!(guest.get(USED + 8), 513u32.to_le_bytes());
    assert_eq!(queue.calls(), 0, "there is nobody to call");
}

/// A chain that is refused has cost what was walked of it.
#[test]
fn a_chain_without_an_end_has_cost_a_ring() {
    let (mut guest, mut queue, _) = Guest::new(None);
    guest.describe(0, HEADER, 16, NEXT, 0);
    guest.offer(0);
    let refused = queue.pop(&mut Request::with_capacity(8)).unwrap();
    let Pop::Refused(token, status) = refused else { panic!("taken") };
    assert_eq!((status, token.status_at.address()), (Status::IoError, None));
    assert!(queue.effort() >= u32::from(SIZE), "{}", queue.effort());
    queue.complete(token, status, 0);
}

/// USED_F_NO_NOTIFY: whoever looks by himself need not be told.
#[test]
fn a_queue_that_is_watched_wants_no_kicks() {
    let (guest, mut queue, _) = Guest::new(None);
    queue.disarm();
    assert_eq!(guest.get(USED), 1u16.to_le_bytes());
    assert_eq!(queue.arm().unwrap(), Armed::Quiet);
    assert_eq!(guest.get(USED), 0u16.to_le_bytes());
    queue.disarm();
    assert_eq!(guest.get(USED), 1u16.to_le_bytes());
}

#[test]
fn each_answer_that_is_wanted_is_a_call() {
    let inbox = Arc::new(SessionInbox::new().unwrap());
    let call = Guest::bell();
    let ours = call.try_clone().unwrap();
    let (mut guest, mut queue, _) = Guest::new(Some(Arc::new(PeerEventfd::new(call, &inbox))));
    for round in 1..=3 {
        guest.read();
        let token = taken(&mut queue).unwrap();
        queue.complete(token, Status::Ok, 512);
        queue.publish().unwrap();
        assert_eq!(queue.calls(), round);
    }
    let mut rung = [0; 8];
    rustix::io::read(&ours, &mut rung).unwrap();
    assert_eq!(u64::from_ne_bytes(rung), 3);
    // Its next place is rung at once.
    let other = Guest::bell();
    let theirs = other.try_clone().unwrap();
    queue.set_call(Some(Arc::new(PeerEventfd::new(other, &inbox))));
    rustix::io::read(&theirs, &mut rung).unwrap();
    assert_eq!((u64::from_ne_bytes(rung), queue.calls()), (1, 4));
}

/// Behind an IOMMU: a request whose translations are missing is no work until they have come.
#[test]
fn a22_a_request_that_waits_for_translations_is_no_work() {
    let (mut guest, mut queue, _) = Guest::new(None);
    let inbox = Arc::new(SessionInbox::new().unwrap());
    queue.put_behind_iommu(Arc::clone(&inbox), 7);
    guest.read();
    assert!(!queue.is_stalled() && queue.has_work());
    assert!(taken(&mut queue).is_none());
    assert!(queue.is_stalled() && !queue.has_work(), "it is in the ring, and waits");
    assert_eq!(queue.arm().unwrap(), Armed::Quiet, "nobody has to look for it");
    assert!(taken(&mut queue).is_none());
    let asked = inbox.take_misses();
    assert!(!asked.is_empty() && asked.iter().all(|&(at, _)| at == 7), "{asked:?}");
    let all = Translation {
        first: 0,
        last: BYTES as u64 - 1,
        host: guest.mapping.at(0),
        permission: Permission::from_bits(3).unwrap(),
    };
    queue.go_on(&Answered { learned: vec![all], denied: Vec::new() });
    assert!(!queue.is_stalled() && queue.has_work());
    assert_eq!(queue.arm().unwrap(), Armed::WorkArrived);
    let token = taken(&mut queue).unwrap();
    queue.complete(token, Status::Ok, 512);
    // Of what was forgotten nothing is known.
    queue.forget(DATA as u64, DATA as u64);
    guest.read();
    assert!(taken(&mut queue).is_none() && queue.is_stalled());
    let asked = inbox.take_misses();
    let [(7, miss)] = asked[..] else { panic!("{asked:?}") };
    assert_eq!(miss.page, DATA as u64);
    queue.go_on(&Answered { learned: Vec::new(), denied: vec![miss] });
    assert!(!queue.is_stalled());
    let refused = queue.pop(&mut Request::with_capacity(8)).unwrap();
    let Pop::Refused(token, Status::IoError) = refused else { panic!("{refused:?}") };
    queue.complete(token, Status::IoError, 0);
    assert_eq!(guest.get(STATUS), [1]);
}

/// Memory that a guest takes back is in use while an answer is to come into it: as of the first byte,
/// and up to the last.
#[test]
fn an_answer_goes_into_the_byte_of_its_status() {
    let (mut guest, mut queue, _) = Guest::new(None);
    guest.read();
    let token = taken(&mut queue).unwrap();
    let at = guest.host(STATUS);
    let far = (at - 0x2000, at - 0x1000);
    for (range, is_in) in [
        ((at, at), true),
        ((at - 5, at), true),
        ((at, at + 5), true),
        ((at - 5, at + 5), true),
        ((at - 5, at - 1), false),
        ((at + 1, at + 5), false),
        ((0, usize::MAX), true),
    ] {
        assert_eq!(queue.answers_into(&token, &[far, range]), is_in, "{range:x?} of {at:x}");
    }
    assert!(!queue.answers_into(&token, &[]) && !queue.is_lost());
    queue.complete(token, Status::Ok, 512);
}
