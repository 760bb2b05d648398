//! A disk on offer, whatever its transport: what the control plane asks of it.

use super::{ChangeError, Export, ExportOptions, ExportReport, Resized, Retried};
use crate::command::{Findings, Handle, Rouse};
use crate::notice::Listener;
use crate::queue::QueueLifecycle;
use crate::stats::WorkerStats;
use ringway_disk::Disk;
use ringway_throttle::Member;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// A disk on offer. Every [`Export`] is one:
///
/// ```no_run
/// # use ringway_export::{Export, Offered, ChangeError, QueueLifecycle};
/// # fn rest<V: QueueLifecycle + 'static, X: QueueLifecycle + 'static>(
/// #     vhost_user: Export<V>,
/// #     xen: Export<X>,
/// # ) -> Result<(), ChangeError> {
/// let disks: [Box<dyn Offered>; 2] = [Box::new(vhost_user), Box::new(xen)];
/// disks.iter().try_for_each(|disk| disk.drain())
/// # }
/// ```
pub trait Offered: Send + Sync {
    /// The disk.
    fn disk(&self) -> &Arc<Disk>;

    /// How it is offered.
    fn options(&self) -> ExportOptions;

    /// True while a front-end is connected.
    fn is_connected(&self) -> bool;

    /// As [`Export::front_end_trouble`].
    fn front_end_trouble(&self) -> Option<String>;

    /// As [`Export::connections`].
    fn connections(&self) -> u64;

    /// True while no requests are to be taken.
    fn is_paused(&self) -> bool;

    /// True once all queues of earlier connections have come back.
    fn is_clear(&self) -> bool;

    /// True while the image is locked for it.
    fn is_locked(&self) -> bool;

    /// As [`Export::end_image`].
    fn end_image(&self, guest_ends: bool, before_it_goes: &mut dyn FnMut() -> bool);

    /// As [`Export::leave_image`].
    ///
    /// # Errors
    /// What the host says.
    fn leave_image(&self) -> io::Result<()>;

    /// As [`Export::let_go`].
    fn let_go(&self) -> bool;

    /// As [`Export::on_notice`].
    fn on_notice(&self, listener: Listener);

    /// As [`Export::report`].
    fn report(&self, workers: &[Option<WorkerStats>]) -> ExportReport;

    /// As [`Export::resize`].
    ///
    /// # Errors
    /// [`ChangeError`].
    fn resize(&self, to: Option<u64>, shrink: bool) -> Result<Resized, ChangeError>;

    /// As [`Export::retry_held`].
    fn retry_held(&self, fail: bool) -> Retried;

    /// As [`Export::pause`].
    ///
    /// # Errors
    /// [`ChangeError`].
    fn pause(&self) -> Result<(), ChangeError>;

    /// As [`Export::resume`].
    ///
    /// # Errors
    /// [`ChangeError`].
    fn resume(&self) -> Result<(), ChangeError>;

    /// As [`Export::drain`].
    ///
    /// # Errors
    /// [`ChangeError`].
    fn drain(&self) -> Result<(), ChangeError>;

    /// As [`Export::may_rest`].
    ///
    /// # Errors
    /// [`ChangeError`].
    fn may_rest(&self) -> Result<(), ChangeError>;

    /// As [`Export::at_rest`].
    ///
    /// # Errors
    /// [`ChangeError`].
    fn at_rest(&self, act: &mut dyn FnMut()) -> Result<Duration, ChangeError>;

    /// As [`Export::sync`].
    ///
    /// # Errors
    /// As there.
    fn sync(&self) -> io::Result<()>;

    /// As [`Export::set_limits`].
    fn set_limits(&self, limits: Vec<Arc<Member>>);
}

impl<Q: QueueLifecycle> Offered for Export<Q> {
    fn disk(&self) -> &Arc<Disk> {
        self.disk()
    }

    fn options(&self) -> ExportOptions {
        self.options()
    }

    fn is_connected(&self) -> bool {
        self.is_connected()
    }

    fn front_end_trouble(&self) -> Option<String> {
        self.front_end_trouble()
    }

    fn connections(&self) -> u64 {
        self.connections()
    }

    fn is_paused(&self) -> bool {
        self.is_paused()
    }

    fn is_clear(&self) -> bool {
        self.is_clear()
    }

    fn is_locked(&self) -> bool {
        self.is_locked()
    }

    fn end_image(&self, guest_ends: bool, before_it_goes: &mut dyn FnMut() -> bool) {
        self.end_image(guest_ends, before_it_goes);
    }

    fn leave_image(&self) -> io::Result<()> {
        self.leave_image()
    }

    fn let_go(&self) -> bool {
        self.let_go()
    }

    fn on_notice(&self, listener: Listener) {
        self.on_notice(listener);
    }

    fn report(&self, workers: &[Option<WorkerStats>]) -> ExportReport {
        self.report(workers)
    }

    fn resize(&self, to: Option<u64>, shrink: bool) -> Result<Resized, ChangeError> {
        self.resize(to, shrink)
    }

    fn retry_held(&self, fail: bool) -> Retried {
        self.retry_held(fail)
    }

    fn pause(&self) -> Result<(), ChangeError> {
        self.pause()
    }

    fn resume(&self) -> Result<(), ChangeError> {
        self.resume()
    }

    fn drain(&self) -> Result<(), ChangeError> {
        self.drain()
    }

    fn may_rest(&self) -> Result<(), ChangeError> {
        self.may_rest()
    }

    fn at_rest(&self, act: &mut dyn FnMut()) -> Result<Duration, ChangeError> {
        self.at_rest(act)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync()
    }

    fn set_limits(&self, limits: Vec<Arc<Member>>) {
        self.set_limits(limits);
    }
}

/// A worker that can be asked for its counts, whatever its queues.
pub trait Counts: Send + Sync {
    /// As [`Handle::ask_stats`].
    ///
    /// # Errors
    /// That the worker has ended.
    fn ask_stats(&self, spreads: bool) -> io::Result<Receiver<WorkerStats>>;

    /// As [`Handle::ask_inspect`].
    ///
    /// # Errors
    /// That the worker has ended.
    fn ask_inspect(
        &self,
        now_ns: u64,
        limit_ns: u64,
        rouse: Option<Rouse>,
    ) -> io::Result<Receiver<Findings>>;
}

impl<Q: QueueLifecycle> Counts for Handle<Q> {
    fn ask_stats(&self, spreads: bool) -> io::Result<Receiver<WorkerStats>> {
        self.ask_stats(spreads)
    }

    fn ask_inspect(
        &self,
        now_ns: u64,
        limit_ns: u64,
        rouse: Option<Rouse>,
    ) -> io::Result<Receiver<Findings>> {
        self.ask_inspect(now_ns, limit_ns, rouse)
    }
}
