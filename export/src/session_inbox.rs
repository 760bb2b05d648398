//! How others reach a session: workers with alarms, the control plane with commands.

use crate::command::Alarm;
use crate::export::GuestNotice;
use ringway_core::mem::Miss;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard};

/// What a session is asked to do. A session that ends meanwhile drops the reply.
#[derive(Debug)]
pub enum SessionCommand {
    /// Tell the front-end that the configuration space has changed.
    Announce(SyncSender<GuestNotice>),
    /// Stop all queues, because the export is paused; `false` if the disk is stuck.
    Pause(SyncSender<bool>),
    /// Start them again; `false` if one does not start.
    Resume(SyncSender<bool>),
}

/// A bell, and why it rings.
#[derive(Debug)]
pub struct SessionInbox {
    bell: OwnedFd,
    alarms: Mutex<Vec<(usize, Alarm)>>,
    /// `None` once the session has ended: what comes then is dropped, and whoever waits hears it.
    commands: Mutex<Option<Vec<SessionCommand>>>,
    /// Pages behind an IOMMU that queues need; a queue that has asked waits for the answer.
    misses: Mutex<Vec<(usize, Miss)>>,
    /// A front-end is there.
    attended: AtomicBool,
    /// The front-end has made a notification block.
    blocked: AtomicBool,
    /// The session is to end.
    is_over: AtomicBool,
}

impl SessionInbox {
    /// For one session.
    ///
    /// # Errors
    /// What the host says to an eventfd.
    pub fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let attended = AtomicBool::new(true);
        let (alarms, misses, is_over, blocked) = Default::default();
        let commands = Mutex::new(Some(Vec::new()));
        Ok(Self { bell, alarms, commands, misses, attended, is_over, blocked })
    }

    /// A session may begin before its front-end is there, and outlive it.
    pub fn attend(&self, attended: bool) {
        self.attended.store(attended, SeqCst);
    }

    /// A front-end is there.
    pub fn is_attended(&self) -> bool {
        self.attended.load(SeqCst)
    }

    /// The front-end has made a notification block: it is called no more, and its connection ends.
    #[cold]
    pub fn block(&self) {
        self.blocked.store(true, SeqCst);
        self.ring();
    }

    /// Looked at before each notification.
    #[inline]
    pub fn was_blocked(&self) -> bool {
        self.blocked.load(Relaxed)
    }

    /// Readable when there is something to take.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// A worker says something about queue `queue`.
    pub fn raise(&self, queue: usize, alarm: Alarm) {
        lock(&self.alarms).push((queue, alarm));
        self.ring();
    }

    /// Queue `queue` needs translations of these pages.
    pub fn miss(&self, queue: usize, missed: &[Miss]) {
        lock(&self.misses).extend(missed.iter().map(|&miss| (queue, miss)));
        self.ring();
    }

    /// Takes all pages that were asked for.
    pub fn take_misses(&self) -> Vec<(usize, Miss)> {
        std::mem::take(&mut *lock(&self.misses))
    }

    /// The control plane wants something.
    pub fn send(&self, command: SessionCommand) {
        if let Some(commands) = &mut *lock(&self.commands) {
            commands.push(command);
        }
        self.ring();
    }

    /// The session has ended: commands that it has not taken are dropped.
    pub fn close(&self) {
        lock(&self.commands).take();
    }

    /// The session is to end its connection, as soon as it hears this.
    pub fn end(&self) {
        self.is_over.store(true, SeqCst);
        self.ring();
    }

    /// The session was told to end its connection.
    pub fn is_over(&self) -> bool {
        self.is_over.load(SeqCst)
    }

    /// Takes all there is.
    pub fn take(&self) -> (Vec<(usize, Alarm)>, Vec<SessionCommand>) {
        let mut counter = [0; 8];
        // Empty already is as good as emptied.
        let _ = rustix::io::read(&self.bell, &mut counter);
        let alarms = std::mem::take(&mut *lock(&self.alarms));
        let commands = lock(&self.commands).as_mut().map(std::mem::take);
        (alarms, commands.unwrap_or_default())
    }

    fn ring(&self) {
        // A full counter rings too.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Broken;
    use ringway_core::mem::Access;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::sync::mpsc::{RecvTimeoutError, sync_channel};
    use std::time::Duration;

    fn rings(inbox: &SessionInbox) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&inbox.bell(), PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    #[test]
    fn whatever_comes_rings_until_the_inbox_is_emptied() {
        let inbox = SessionInbox::new().unwrap();
        assert!(!rings(&inbox));
        let (reply, _told) = sync_channel(1);
        let sends: [&dyn Fn(); 5] = [
            &|| inbox.raise(3, Alarm::WorkerFailed),
            &|| inbox.miss(4, &[Miss { page: 4096, access: Access::Read }]),
            &|| inbox.send(SessionCommand::Pause(reply.clone())),
            &|| inbox.block(),
            &|| inbox.end(),
        ];
        for (number, send) in sends.iter().enumerate() {
            send();
            assert!(rings(&inbox), "number {number}");
            inbox.take();
            assert!(!rings(&inbox), "number {number}");
        }
    }

    #[test]
    fn what_came_is_taken_once() {
        let inbox = SessionInbox::new().unwrap();
        inbox.raise(3, Alarm::WorkerFailed);
        inbox.raise(5, Alarm::Broken(Broken::MemoryGone));
        let pages = [1, 2].map(|page| Miss { page: page * 4096, access: Access::Write });
        inbox.miss(4, &pages);
        let (reply, told) = sync_channel(1);
        inbox.send(SessionCommand::Resume(reply));
        let (alarms, mut commands) = inbox.take();
        let alarms: Vec<_> = alarms.iter().map(|(queue, alarm)| (*queue, alarm)).collect();
        assert!(
            matches!(
                alarms[..],
                [(3, Alarm::WorkerFailed), (5, Alarm::Broken(Broken::MemoryGone))]
            ),
            "{alarms:?}"
        );
        assert_eq!(inbox.take_misses(), pages.map(|miss| (4, miss)));
        let (Some(SessionCommand::Resume(reply)), None) = (commands.pop(), commands.pop()) else {
            panic!("one command");
        };
        reply.send(true).unwrap();
        assert!(told.recv().unwrap());
        let (alarms, commands) = inbox.take();
        assert!(alarms.is_empty() && commands.is_empty() && inbox.take_misses().is_empty());
    }

    /// Whoever waits for a session that has ended hears so.
    #[test]
    fn commands_to_a_session_that_has_ended_are_dropped() {
        let inbox = SessionInbox::new().unwrap();
        let (before, heard_before) = sync_channel(1);
        let (after, heard_after) = sync_channel::<bool>(1);
        inbox.send(SessionCommand::Pause(before));
        assert_eq!(heard_before.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Timeout));
        inbox.close();
        inbox.send(SessionCommand::Pause(after));
        for heard in [heard_before, heard_after] {
            let waited = heard.recv_timeout(Duration::ZERO);
            assert_eq!(waited, Err(RecvTimeoutError::Disconnected));
        }
        assert!(inbox.take().1.is_empty());
    }

    #[test]
    fn what_is_said_of_a_session_stays_said() {
        let inbox = SessionInbox::new().unwrap();
        assert!(inbox.is_attended() && !inbox.was_blocked() && !inbox.is_over());
        inbox.attend(false);
        assert!(!inbox.is_attended());
        inbox.attend(true);
        assert!(inbox.is_attended());
        inbox.block();
        assert!(inbox.was_blocked() && !inbox.is_over());
        inbox.end();
        inbox.take();
        assert!(inbox.was_blocked() && inbox.is_over());
    }
}
