//! The rings themselves under the model checker: `RUSTFLAGS="--cfg loom" cargo test --release
//! -p ringway-ring --lib blkif::models`. Drain, re-arm, look again: whatever order the two sides'
//! stores become visible in, nobody sleeps on work. A lost notification is a deadlock, which loom
//! reports.

use super::tests::{ALL, Memory, READ, Shape, nothing};
use super::{Abi, Armed};
use crate::shared::forget_all;
use crate::virtqueue::models::Bell;
use loom::sync::Arc;
use ringway_core::Status;

const REQUESTS: u32 = 2;

fn check(model: impl Fn(Shape) + Copy + Send + Sync + 'static) {
    // The layout of a slot is no matter of order; the indices wrap between the two requests.
    for first in [0, u32::MAX] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            forget_all();
            model(Shape { abi: Abi::X86_64, order: 0, first });
        });
    }
}

/// The front side publishes request after request while the back side drains, re-arms and sleeps.
#[test]
fn no_notification_of_a_request_is_lost() {
    check(|shape| {
        let memory = Memory::new(shape);
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        let bell = Arc::new(Bell::default());
        let notified = Arc::clone(&bell);
        let server = loom::thread::spawn(move || {
            let mut popped = 0;
            loop {
                while let Some((token, asked)) = back.pop(&mut nothing).unwrap() {
                    assert_eq!(asked.unwrap().pieces().len(), 1);
                    back.push(token, Status::Ok);
                    popped += 1;
                }
                if popped == REQUESTS {
                    break;
                }
                if back.arm().unwrap() == Armed::Quiet {
                    notified.wait();
                }
                back.disarm();
            }
        });
        for _ in 0..REQUESTS {
            front.push(READ).unwrap();
            if front.publish() {
                bell.ring();
            }
        }
        server.join().unwrap();
    });
}

fn no_notification_of_an_answer_is_lost_after(shape: Shape, after: u32) {
    let memory = Memory::new(shape);
    let (mut front, mut back) = (memory.front(), memory.back(ALL));
    let mut tokens = Vec::new();
    for _ in 0..REQUESTS {
        front.push(READ).unwrap();
    }
    let _ = front.publish();
    while let Some((token, _)) = back.pop(&mut nothing).unwrap() {
        tokens.push(token);
    }
    let bell = Arc::new(Bell::default());
    let notified = Arc::clone(&bell);
    let server = loom::thread::spawn(move || {
        for token in tokens {
            back.push(token, Status::Ok);
            if back.publish() {
                notified.ring();
            }
        }
    });
    let mut popped = 0;
    loop {
        while let Some(answer) = front.pop_response().unwrap() {
            assert_eq!(answer.status, Status::Ok);
            popped += 1;
        }
        if popped == REQUESTS {
            break;
        }
        if front.arm(after).unwrap() == Armed::Quiet {
            bell.wait();
        }
        front.disarm();
    }
    server.join().unwrap();
}

/// The back side publishes answer after answer while the front side drains, re-arms and sleeps.
#[test]
fn no_notification_of_an_answer_is_lost() {
    check(|shape| no_notification_of_an_answer_is_lost_after(shape, 1));
}

/// The same with a front side that sleeps through the first answer.
#[test]
fn no_notification_of_several_answers_is_lost() {
    check(|shape| no_notification_of_an_answer_is_lost_after(shape, 2));
}

/// What is written before a batch is published is seen by who sees its first slot, either way.
#[test]
fn a_batch_is_seen_whole() {
    check(|shape| {
        let memory = Memory::new(shape);
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        for _ in 0..REQUESTS {
            front.push(READ).unwrap();
        }
        let server = loom::thread::spawn(move || {
            let mut tokens = Vec::new();
            while let Some((token, asked)) = back.pop(&mut nothing).unwrap() {
                assert_eq!(asked.unwrap().range().offset(), 8 * 512);
                tokens.push(token);
            }
            assert!(tokens.is_empty() || tokens.len() == REQUESTS as usize, "half a batch");
            for token in tokens {
                back.push(token, Status::Ok);
            }
            let _ = back.publish();
        });
        let _ = front.publish();
        let mut popped = 0;
        while front.pop_response().unwrap().is_some() {
            popped += 1;
        }
        assert!(popped == 0 || popped == REQUESTS, "half a batch came back");
        server.join().unwrap();
    });
}
