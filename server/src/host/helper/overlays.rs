//! New images on top of those that are served, and bases that are written: the helper's side. To make files
//! durable takes its time, so each step has a thread, which acts as the daemon's user.

use super::super::image_message::ImageMessage;
use super::super::path_message::Name;
use super::super::protocol::{HelperAnswer, HelperRequest, OverlayWanted};
use super::super::state::StateKeeper;
use super::{Answered, Helper, SharedKeeper, Things, lock, lock_keeper, written};
use anyhow::{Context, anyhow, bail};
use ringway_disk::{NewOverlay, OverlayShape, Unmapped, reopen_for_writing};
use ringway_image::Use;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long the last step of a daemon that has died may take.
const LAST_STEP: Duration = Duration::from_secs(5);

impl Helper {
    /// What is asked for in a snapshot.
    pub(super) fn handle_overlay(&self, request: HelperRequest, fd: Option<OwnedFd>) -> Answered {
        match request {
            HelperRequest::StateWatches { number } => self.state_watches(number, fd),
            HelperRequest::StateFollows { number } => self.state_follows(number, fd),
            HelperRequest::StateSettled { number, follows } => self.state_settled(number, follows),
            HelperRequest::Overlay(wanted) => self.overlay(*wanted, fd),
            HelperRequest::NameOverlay { number } => self.name_overlay(number),
            HelperRequest::EndOverlay { number, kept } => self.end_overlay(number, kept),
            HelperRequest::Writable { name, base } => self.writable(name, base, fd),
            _ => bail!("nobody knows what to do"),
        }
    }

    /// Carries out a step, and answers it on a line of its own.
    fn spawn_step(
        &self,
        step: impl FnOnce(&Mutex<Things>) -> Answered + Send + 'static,
    ) -> Answered {
        if !(self.duties.adds || self.duties.changes) {
            bail!("this daemon was started without --control");
        }
        self.on_thread(("overlay", &self.steps), self.account(), step)
    }

    fn overlay(&self, wanted: OverlayWanted, image: Option<OwnedFd>) -> Answered {
        let image = written(image)?;
        let (path, snapshot) = (PathBuf::from(wanted.path), PathBuf::from(wanted.snapshot));
        let shape = OverlayShape {
            format: wanted.format.parse().map_err(|error| anyhow!("{error}"))?,
            virtual_size: wanted.virtual_size,
            cluster_bits: wanted.cluster_bits,
            direct: wanted.direct,
        };
        self.spawn_step(move |things| {
            let made = NewOverlay::make(&path, &image, &snapshot, shape)?;
            let (overlay, layer, alignment) = made;
            let snapshot = overlay.snapshot().into();
            let file = layer.file.try_clone()?.into();
            let usage = Use { read_only: false, grows: true, barriers: true };
            let words = ImageMessage::of(Unmapped { layers: vec![layer], usage }, &mut Vec::new());
            let mut list = lock(things);
            list.next += 1;
            let number = list.next;
            drop(list);
            put(things, number, overlay);
            let alignment = (alignment.memory, alignment.offset);
            Ok((HelperAnswer::Overlay { number, image: words, alignment, snapshot }, Some(file)))
        })
    }

    fn name_overlay(&self, number: u64) -> Answered {
        self.spawn_step(move |things| {
            let mut overlay = take(things, number)?;
            let named = overlay.take_name();
            // Also if it has failed: whoever asked ends it.
            put(things, number, overlay);
            named?;
            Ok((HelperAnswer::Done, None))
        })
    }

    fn end_overlay(&self, number: u64, kept: bool) -> Answered {
        self.spawn_step(move |things| {
            let overlay = take(things, number)?;
            match kept {
                true => overlay.keep(),
                false => overlay.undo()?,
            }
            Ok((HelperAnswer::Done, None))
        })
    }

    /// What a disk is based on is to be written.
    fn writable(&self, name: Name, base: Option<Name>, file: Option<OwnedFd>) -> Answered {
        let file = File::from(file.context("the file does not come with it")?);
        self.spawn_step(move |_| {
            let (name, base) = (PathBuf::from(name), base.map(PathBuf::from));
            let writable = reopen_for_writing(&file, Some(&name), base.as_deref())?;
            Ok((HelperAnswer::Writable, Some(writable.into())))
        })
    }

    /// Waits for the steps of a daemon that has died, each of which holds what it names.
    pub(super) fn await_steps(&self) {
        let begun = Instant::now();
        while Arc::strong_count(&self.steps) > 1 && begun.elapsed() < LAST_STEP {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn state_watches(&self, number: u64, data: Option<OwnedFd>) -> Answered {
        let (data, keeper) = (written(data)?, self.keeper(number)?);
        self.beside(move |_| {
            lock_keeper(&keeper).watch(&data);
            Ok((HelperAnswer::Done, None))
        })
    }

    fn state_follows(&self, number: u64, image: Option<OwnedFd>) -> Answered {
        let (image, keeper) = (written(image)?, self.keeper(number)?);
        self.beside(move |things| change(things, number, &keeper, |keeper| keeper.follow(image)))
    }

    fn state_settled(&self, number: u64, follows: bool) -> Answered {
        let keeper = self.keeper(number)?;
        self.beside(move |things| {
            change(things, number, &keeper, |keeper| {
                keeper.settle(follows);
                Ok(())
            })
        })
    }

    fn keeper(&self, number: u64) -> anyhow::Result<SharedKeeper> {
        let things = lock(&self.things);
        let (keeper, _) = things.states.get(&number).context("there is no such state")?;
        Ok(Arc::clone(keeper))
    }
}

/// Changes which images a state is of.
fn change(
    things: &Mutex<Things>,
    number: u64,
    keeper: &Mutex<StateKeeper>,
    change: impl FnOnce(&mut StateKeeper) -> anyhow::Result<()>,
) -> Answered {
    let mut keeper = lock_keeper(keeper);
    change(&mut keeper)?;
    if let Some((_, names)) = lock(things).states.get_mut(&number) {
        *names = keeper.names();
    }
    Ok((HelperAnswer::Done, None))
}

/// Keeps it for who asked for it. If that is dead, what has its name stays, and what has none goes.
pub(super) fn put(things: &Mutex<Things>, number: u64, overlay: NewOverlay) {
    let mut list = lock(things);
    if !list.ended {
        list.overlays.insert(number, overlay);
        return;
    }
    drop(list);
    overlay.keep();
}

pub(super) fn take(things: &Mutex<Things>, number: u64) -> anyhow::Result<NewOverlay> {
    lock(things).overlays.remove(&number).with_context(|| format!("there is no image {number}"))
}
