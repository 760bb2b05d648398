//! The daemon's side: asks the helper.

use super::local::CloneWords;
use super::protocol::{HelperAnswer, HelperRequest, SocketBusy, Wanted};
use super::state::NoPlace;
use super::wire::{AskError, Asker, LOST, receive};
use crate::xen;
use anyhow::{Context, anyhow, bail};
use ringway_control::config::Location;
use ringway_core::thread::carries_data;
use ringway_disk::{Disk, OpenOptions};
use ringway_vhost_user::Access;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fmt::Display;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A disk that the helper has opened.
pub(super) struct Opened {
    pub(super) disk: Disk,
    /// Its file, if that was made.
    pub(super) new: Option<HelpersFile>,
    /// Its file, if that is a clone that goes with the disk.
    pub(super) clone: Option<EphemeralFile>,
}

/// A file that stays when this is dropped: only who asks for it removes it.
pub(super) struct EphemeralFile(Option<HelpersFile>);

impl EphemeralFile {
    pub(super) fn remove(mut self) -> anyhow::Result<()> {
        self.0.take().map_or(Ok(()), HelpersFile::remove)
    }
}

impl Drop for EphemeralFile {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(HelpersFile::keep);
    }
}

/// How long a path may take to be looked up.
pub(crate) const LOOK_UP_MAX: Duration = Duration::from_secs(10);

/// How often to ask again whether a state is left.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// A line to the helper.
pub(super) struct Client {
    /// Held from a question to its answer, which never takes long.
    line: Mutex<Asker>,
    /// States of disks whose last hold was a worker's, which asks nobody for anything: the helper is
    /// told with the next question.
    let_go: Mutex<Vec<u64>>,
    /// The same line, for whoever waits for its end.
    end: Option<OwnedFd>,
}

impl Client {
    pub(super) fn new(line: OwnedFd) -> Self {
        let end = line.try_clone().ok();
        Self { line: Mutex::new(Asker::new(line)), let_go: Mutex::default(), end }
    }

    /// Hangs up when the helper has ended.
    pub(super) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.end.as_ref().map(AsFd::as_fd)
    }

    /// A refusal becomes an error.
    pub(super) fn ask(
        &self,
        request: &HelperRequest,
    ) -> anyhow::Result<(HelperAnswer, Option<OwnedFd>)> {
        self.ask_with(request, None)
    }

    pub(super) fn ask_with(
        &self,
        request: &HelperRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<(HelperAnswer, Option<OwnedFd>)> {
        let mut line = self.line.lock().unwrap_or_else(|e| e.into_inner());
        let let_go = || self.let_go.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            // Not held meanwhile: a worker may be about to add one.
            let Some(number) = let_go().pop() else { break };
            // What it says to that is nothing to who asks now, if it lives.
            let told = line.ask::<HelperAnswer>(&HelperRequest::Stateless { number }, None);
            if let Some(error) = told.err().filter(AskError::is_gone) {
                // If it lives after all, it is told with the next one.
                let_go().push(number);
                return Err(failed(error));
            }
        }
        line.ask(request, fd).map_err(failed).and_then(judged)
    }

    /// Asks for what is answered on a line of its own.
    pub(super) fn ask_deferred(
        &self,
        request: &HelperRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<(HelperAnswer, Option<OwnedFd>)> {
        answer(&self.line_for(request, fd)?)
    }

    /// Asks for what the helper does at once, or on a thread: others may ask it meanwhile.
    fn ask_beside(
        &self,
        request: &HelperRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<(HelperAnswer, Option<OwnedFd>)> {
        match self.ask_with(request, fd)? {
            (HelperAnswer::Wait, Some(line)) => answer(&line),
            (HelperAnswer::Wait, None) => bail!(LOST),
            answered => Ok(answered),
        }
    }

    /// The same for what names a path. A file system that hangs is not waited for.
    fn look_up(
        &self,
        what: impl Display,
        request: &HelperRequest,
    ) -> anyhow::Result<(HelperAnswer, Option<OwnedFd>)> {
        let line = self.line_for(request, None)?;
        let begun = Instant::now();
        loop {
            let left = LOOK_UP_MAX.saturating_sub(begun.elapsed());
            match poll(
                &mut [PollFd::new(&line, PollFlags::IN)],
                Timespec::try_from(left).ok().as_ref(),
            ) {
                Err(Errno::INTR) => {}
                Ok(0) => return Err(hangs(what)),
                _ => return answer(&line),
            }
        }
    }

    fn line_for(
        &self,
        request: &HelperRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<OwnedFd> {
        match self.ask_with(request, fd)? {
            (HelperAnswer::Wait, Some(line)) => Ok(line),
            (HelperAnswer::Wait, None) => bail!(LOST),
            _ => bail!(OUT_OF_TURN),
        }
    }

    /// The state of a disk, and who has the helper let it go.
    pub(super) fn state(
        self: &Arc<Self>,
        image: &File,
        cached: bool,
    ) -> anyhow::Result<(File, HelpersState)> {
        self.states(&HelperRequest::State { cached }, Some(image.as_fd()))
    }

    /// The same of an export that the helper has connected to.
    pub(super) fn state_of_export(
        self: &Arc<Self>,
        name: &str,
    ) -> anyhow::Result<(File, HelpersState)> {
        self.states(&HelperRequest::StateOfExport { name: Path::new(name).into() }, None)
    }

    fn states(
        self: &Arc<Self>,
        request: &HelperRequest,
        image: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<(File, HelpersState)> {
        match self.ask_beside(request, image)? {
            (HelperAnswer::State { number }, Some(file)) => {
                Ok((file.into(), HelpersState { helper: Arc::clone(self), number }))
            }
            (HelperAnswer::State { number }, None) => {
                // Else it had the image, with its lock, until the end.
                drop(HelpersState { helper: Arc::clone(self), number });
                bail!("the state of a disk: {LOST}")
            }
            (HelperAnswer::NoPlace { why }, _) => bail!(NoPlace(why)),
            _ => bail!(OUT_OF_TURN),
        }
    }

    pub(super) fn open(
        self: &Arc<Self>,
        options: &OpenOptions,
        clone: &CloneWords,
    ) -> anyhow::Result<Opened> {
        let line = self.begin(options, clone)?;
        self.opened(&line)
    }

    /// Has a disk opened. [`Client::opened`] waits for it, while others are being opened.
    pub(super) fn begin(
        &self,
        options: &OpenOptions,
        clone: &CloneWords,
    ) -> anyhow::Result<OwnedFd> {
        self.wanted(Wanted::of(options, (clone, false))?)
    }

    /// An export of which there is a disk already.
    pub(super) fn open_again(self: &Arc<Self>, options: &OpenOptions) -> anyhow::Result<Opened> {
        let line = self.wanted(Wanted::of(options, (&CloneWords::default(), true))?)?;
        self.opened(&line)
    }

    fn wanted(&self, wanted: Wanted) -> anyhow::Result<OwnedFd> {
        self.line_for(&HelperRequest::Open(Box::new(wanted)), None)
    }

    /// The disk that is being opened at the other end of a line.
    pub(super) fn opened(self: &Arc<Self>, line: &OwnedFd) -> anyhow::Result<Opened> {
        let (HelperAnswer::Opened { found, new, clone }, file) = answer(line)? else {
            bail!(OUT_OF_TURN);
        };
        // Goes again if anything is amiss from here on.
        let new = new.map(|number| HelpersFile::new(self, number));
        let clone = clone.map(|number| EphemeralFile(Some(HelpersFile::new(self, number))));
        let file = file.context(LOST)?;
        let mut others = Vec::new();
        for _ in 0..found.others() {
            let (HelperAnswer::Layer, file) = answer(line)? else {
                bail!(OUT_OF_TURN);
            };
            others.push(file.context(LOST)?);
        }
        Ok(Opened { disk: found.into_disk(file, others)?, new, clone })
    }

    pub(super) fn listen(
        self: &Arc<Self>,
        path: &Path,
        private: bool,
        Access { mode, group }: Access,
    ) -> anyhow::Result<(UnixListener, HelpersFile, PathBuf)> {
        let request = HelperRequest::Listen { path: path.into(), private, mode, group };
        let asked = self.look_up(path.display(), &request)?;
        let (HelperAnswer::Listening { number, path }, socket) = asked else {
            bail!(OUT_OF_TURN);
        };
        let file = HelpersFile::new(self, number);
        Ok((socket.context(LOST)?.into(), file, path.into()))
    }

    pub(super) fn configuration(&self) -> anyhow::Result<File> {
        match self.look_up("the configuration", &HelperRequest::Configuration)? {
            (HelperAnswer::Configuration, Some(file)) => Ok(file.into()),
            _ => bail!(OUT_OF_TURN),
        }
    }

    pub(super) fn locate(&self, path: &Path) -> anyhow::Result<Location> {
        match self.look_up(path.display(), &HelperRequest::Locate { path: path.into() })? {
            (HelperAnswer::Located(location), _) => Ok(location),
            _ => bail!(OUT_OF_TURN),
        }
    }

    pub(super) fn holder(&self, path: &Path, read_only: bool) -> anyhow::Result<Option<String>> {
        match self
            .look_up(path.display(), &HelperRequest::Holder { path: path.into(), read_only })?
        {
            (HelperAnswer::Holder(holder), _) => Ok(holder),
            _ => bail!(OUT_OF_TURN),
        }
    }

    /// The disk of this image was removed for good. If the helper has gone, what it noted of that stays.
    pub(super) fn forget_image(&self, path: &Path) {
        let _ = self.ask(&HelperRequest::Forget { path: path.into() });
    }

    pub(super) fn started(&self) -> anyhow::Result<()> {
        self.ask(&HelperRequest::Started).map(drop)
    }
}

#[cfg(feature = "xen")]
impl xen::Access for Client {
    fn open(&self, what: xen::Named) -> std::io::Result<Option<OwnedFd>> {
        // With all reasons, as nobody below looks at more than one line.
        let in_full = |error| ringway_terminal::reasons::in_full(&error);
        let answer = self.ask(&HelperRequest::Xen(what));
        match answer.map_err(|error| std::io::Error::other(in_full(error)))? {
            (HelperAnswer::Named { there: true }, Some(file)) => Ok(Some(file)),
            (HelperAnswer::Named { there: false }, _) => Ok(None),
            _ => Err(std::io::Error::other(OUT_OF_TURN)),
        }
    }
}

#[cfg(not(feature = "xen"))]
impl xen::Access for Client {}

pub(super) const OUT_OF_TURN: &str = "the process that opens files answers something else";

/// Nobody is at the other end of the line any more.
#[derive(Debug, thiserror::Error)]
#[error(
    "the process that opens files for this daemon has ended (ringway-helper). Disks are served on; to add some, start \
     the daemon anew"
)]
pub(super) struct HelperEnded;

/// Whatever the host says to a line, nobody is at its other end.
fn failed(error: AskError) -> anyhow::Error {
    if error.is_gone() { HelperEnded.into() } else { error.into() }
}

pub(crate) fn hangs(what: impl Display) -> anyhow::Error {
    let seconds = LOOK_UP_MAX.as_secs();
    anyhow!("{what}: it cannot be looked up within {seconds} s: its file system hangs")
}

/// A refusal becomes an error.
fn judged(
    (answer, fd): (HelperAnswer, Option<OwnedFd>),
) -> anyhow::Result<(HelperAnswer, Option<OwnedFd>)> {
    match answer {
        HelperAnswer::Refused { why, socket_busy: true } => Err(SocketBusy(why).into()),
        HelperAnswer::Refused { why, socket_busy: false } => Err(anyhow!(why)),
        answer => Ok((answer, fd)),
    }
}

/// The next answer on a line that has no other purpose.
pub(super) fn answer(line: &OwnedFd) -> anyhow::Result<(HelperAnswer, Option<OwnedFd>)> {
    receive(line).map_err(|error| failed(error.into())).and_then(judged)
}

/// The state of a disk that the helper looks after until this is dropped.
pub(super) struct HelpersState {
    helper: Arc<Client>,
    number: u64,
}

impl HelpersState {
    /// The data of its image are in this file.
    pub(super) fn watch(&self, data: &File) -> anyhow::Result<()> {
        let request = HelperRequest::StateWatches { number: self.number };
        self.helper.ask_beside(&request, Some(data.as_fd())).map(drop)
    }

    /// The disk is about to be served from this image.
    pub(super) fn follow(&self, image: &File) -> anyhow::Result<()> {
        let request = HelperRequest::StateFollows { number: self.number };
        self.helper.ask_beside(&request, Some(image.as_fd())).map(drop)
    }

    /// It is, or it is not.
    pub(super) fn settle(&self, follows: bool) -> anyhow::Result<()> {
        let request = HelperRequest::StateSettled { number: self.number, follows };
        self.helper.ask_beside(&request, None).map(drop)
    }
}

impl Drop for HelpersState {
    fn drop(&mut self) {
        if carries_data() {
            let mut let_go = self.helper.let_go.lock().unwrap_or_else(|e| e.into_inner());
            let_go.push(self.number);
            return;
        }
        // If the helper has gone, what it kept stays for whoever serves the disk next.
        let request = HelperRequest::Stateless { number: self.number };
        while let Ok((HelperAnswer::Wait, line)) = self.helper.ask(&request) {
            if let Some(line) = line {
                let _ = answer(&line);
                return;
            }
            // No descriptor is free for the line, and the lock of the image may not go before it is left.
            std::thread::park_timeout(ASK_AGAIN);
        }
    }
}

/// A file that the helper has made, and removes when this is dropped.
pub(super) struct HelpersFile {
    helper: Arc<Client>,
    number: u64,
    kept: bool,
}

impl HelpersFile {
    fn new(helper: &Arc<Client>, number: u64) -> Self {
        Self { helper: Arc::clone(helper), number, kept: false }
    }

    fn remove(mut self) -> anyhow::Result<()> {
        self.kept = true;
        self.helper.look_up("a file", &HelperRequest::Remove { number: self.number }).map(drop)
    }

    /// Lets it stay.
    pub(super) fn keep(mut self) {
        self.kept = true;
        // If the helper has gone it removes nothing either.
        let _ = self.helper.ask(&HelperRequest::Keep { number: self.number });
    }
}

impl Drop for HelpersFile {
    fn drop(&mut self) {
        if !self.kept {
            // Best effort: a socket that stays is replaced by the next daemon.
            let _ = self.helper.look_up("a file", &HelperRequest::Remove { number: self.number });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::forked::line;
    use super::super::wire::{Numbered, send};
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::IoSlice;
    use std::mem::MaybeUninit;

    /// The line of each answer is lost, as no descriptor is free.
    #[test]
    fn e74_a_state_is_waited_for_until_it_is_left() {
        let (ours, its) = line().unwrap();
        let helper = std::thread::spawn(move || {
            for request in 1..=3 {
                let (HelperRequest::Stateless { number: 7 }, _) = receive(&its).unwrap() else {
                    panic!()
                };
                let answer = match request {
                    3 => HelperAnswer::Refused { why: "no such state".into(), socket_busy: false },
                    _ => HelperAnswer::Wait,
                };
                send(&its, &Numbered { request, answer }, None).unwrap();
            }
        });
        drop(HelpersState { helper: Arc::new(Client::new(ours)), number: 7 });
        helper.join().unwrap();
    }

    /// There is room for one descriptor, and by alignment for a few more: with eight the kernel says what it does when
    /// there is none.
    #[test]
    fn e51_what_was_made_for_an_answer_whose_descriptor_is_lost_goes() {
        let (ours, its) = line().unwrap();
        let helper = std::thread::spawn(move || {
            let (HelperRequest::State { .. }, _) = receive(&its).unwrap() else { panic!() };
            let answer = Numbered { request: 1, answer: HelperAnswer::State { number: 7 } };
            let bytes = serde_json::to_vec(&answer).unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [its.as_fd(); 8];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(&its, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
            let (HelperRequest::Stateless { number: 7 }, _) = receive(&its).unwrap() else {
                panic!("its image stays locked")
            };
            let answer = HelperAnswer::Done;
            send(&its, &Numbered { request: 2, answer }, None).unwrap();
            let (HelperRequest::Started, _) = receive(&its).unwrap() else { panic!() };
            let answer = HelperAnswer::Done;
            send(&its, &Numbered { request: 3, answer }, None).unwrap();
        });
        let client = Arc::new(Client::new(ours));
        let image = tempfile::tempfile().unwrap();
        let error = client.state(&image, true).err().expect("there is no file");
        assert!(error.to_string().contains("ulimit -n"), "{error}");
        client.started().unwrap();
        helper.join().unwrap();
    }
}
