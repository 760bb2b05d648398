//! The rings themselves under the model checker: `RUSTFLAGS="--cfg loom" cargo test --release
//! -p ringway-ring --lib models`. Drain, re-arm, look again: whatever order the two sides' stores
//! become visible in, nobody sleeps on work. A lost notification is a deadlock, which loom reports.

use super::tests::{GUEST, Memory, Shape};
use super::{Armed, Piece};
use crate::shared::forget_all;
use loom::sync::{Arc, Condvar, Mutex};

const PIECE: Piece = Piece { addr: GUEST, len: 512 };
const CHAINS: usize = 2;

/// An eventfd.
#[derive(Default)]
pub(crate) struct Bell {
    rung: Mutex<bool>,
    heard: Condvar,
}

impl Bell {
    pub(crate) fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.heard.notify_one();
    }

    pub(crate) fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.heard.wait(rung).unwrap();
        }
        *rung = false;
    }
}

fn shapes() -> impl Iterator<Item = Shape> {
    [false, true].into_iter().flat_map(|packed| {
        // The ring wraps: between the two chains if it is packed.
        [false, true].map(|event_idx| Shape {
            packed,
            size: 4,
            first: 3,
            event_idx,
            entries: 0,
            when_scarce: false,
        })
    })
}

fn check(model: impl Fn(Shape) + Copy + Send + Sync + 'static) {
    for shape in shapes() {
        println!("{shape:?}");
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            forget_all();
            model(shape);
        });
    }
}

/// The driver publishes chain after chain while the device drains, re-arms and sleeps.
#[test]
fn no_kick_is_lost() {
    check(|shape| {
        let memory = Memory::new(shape);
        let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
        let mut translator = memory.translator();
        device.disarm();
        let bell = Arc::new(Bell::default());
        let kicked = Arc::clone(&bell);
        let server = loom::thread::spawn(move || {
            let mut popped = 0;
            loop {
                while let Some((head, chain)) = device.pop(&mut translator).unwrap() {
                    assert_eq!(chain.unwrap().readable().len(), 1);
                    device.push(head, 0);
                    popped += 1;
                }
                if popped == CHAINS {
                    break;
                }
                if device.arm().unwrap() == Armed::Quiet {
                    kicked.wait();
                }
                device.disarm();
            }
        });
        for _ in 0..CHAINS {
            driver.add(&[PIECE], &[]).unwrap();
            if driver.publish() {
                bell.ring();
            }
        }
        server.join().unwrap();
    });
}

fn no_call_is_lost_after(shape: Shape, after: u16, first: usize) {
    let memory = Memory::new(shape);
    let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
    let mut translator = memory.translator();
    let mut heads = Vec::new();
    for chain in 0..CHAINS {
        let pieces = if chain == 0 { first } else { 1 };
        driver.add(&[PIECE; 2][..pieces], &[]).unwrap();
    }
    let _ = driver.publish();
    while let Some((head, _)) = device.pop(&mut translator).unwrap() {
        heads.push(head);
    }
    let bell = Arc::new(Bell::default());
    let called = Arc::clone(&bell);
    let server = loom::thread::spawn(move || {
        for head in heads {
            device.push(head, 7);
            if device.publish() {
                called.ring();
            }
        }
    });
    let mut popped = 0;
    loop {
        while let Some(used) = driver.pop_used().unwrap() {
            assert_eq!(used.len, 7);
            popped += 1;
        }
        if popped == CHAINS {
            break;
        }
        if driver.arm(after).unwrap() == Armed::Quiet {
            bell.wait();
        }
        driver.disarm();
    }
    server.join().unwrap();
}

/// The device publishes answer after answer while the driver drains, re-arms and sleeps.
#[test]
fn no_call_is_lost() {
    check(|shape| no_call_is_lost_after(shape, 1, 1));
}

/// The same with a driver that sleeps through the first answer.
#[test]
fn no_call_for_several_is_lost() {
    check(|shape| no_call_is_lost_after(shape, 2, 1));
}

/// The same where the first answer takes the device further than a short chain would.
#[test]
fn no_call_for_several_is_lost_behind_a_long_chain() {
    check(|shape| no_call_is_lost_after(shape, 2, 2));
}

/// What is written before a batch is published is seen by who sees its first chain: the used entries
/// of a batch, the chains of a batch.
#[test]
fn a_batch_is_seen_whole() {
    check(|shape| {
        let memory = Memory::new(shape);
        let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
        let mut translator = memory.translator();
        for _ in 0..CHAINS {
            driver.add(&[PIECE], &[]).unwrap();
        }
        let server = loom::thread::spawn(move || {
            let mut heads = Vec::new();
            while let Some((head, _)) = device.pop(&mut translator).unwrap() {
                heads.push(head);
            }
            assert!(heads.is_empty() || heads.len() == CHAINS, "half a batch");
            for head in heads {
                device.push(head, 7);
            }
            let _ = device.publish();
        });
        let _ = driver.publish();
        let mut popped = 0;
        while let Some(used) = driver.pop_used().unwrap() {
            assert_eq!(used.len, 7);
            popped += 1;
        }
        assert!(popped == 0 || popped == CHAINS, "half a batch came back");
        server.join().unwrap();
    });
}
