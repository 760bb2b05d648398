//! What a queue needs that serves an image with a map: its other files, and the line to its thread.

use super::DiskQueue;
use ringway_aio::{BellId, Engine};
use ringway_image::ImageClient;
use std::io;

impl<C> Drop for DiskQueue<C> {
    /// The lists of segments are in the slots.
    fn drop(&mut self) {
        self.let_go(true);
        self.close_image();
    }
}

impl<C> DiskQueue<C> {
    /// Has the engine know the image's other files, and listen to its thread: `bell` rings when
    /// [`DiskQueue::take_answers`] has something to do. Control plane.
    ///
    /// # Errors
    /// What the host says; [`DiskQueue::detach_image`] has to be called all the same.
    pub fn attach_image<E: Engine>(
        &mut self,
        engine: &mut E,
        client: ImageClient,
        bell: BellId,
    ) -> io::Result<()> {
        let Some(image) = &self.issuer.image else { return Ok(()) };
        for file in image.files().iter().skip(1) {
            self.issuer.others.push(self.issuer.disk.storage().attach(engine, file)?);
        }
        engine.watch(bell, client.bell())?;
        self.slow.client = Some(client);
        Ok(())
    }

    /// Undoes [`DiskQueue::attach_image`]. Nothing may be in flight. Does nothing for raw images.
    pub fn detach_image<E: Engine>(&mut self, engine: &mut E, bell: BellId) {
        if let Some(client) = self.slow.client.take() {
            engine.unwatch(bell, client.bell());
        }
        for file in self.issuer.others.drain(..) {
            engine.detach(file);
        }
    }

    /// Waits until the image's thread uses no memory of requests any more. They are answered by nobody
    /// then.
    pub fn close_image(&mut self) {
        self.slow.client = None;
    }

    /// Takes what the image's thread has answered. Requests that are done by that are late answers
    /// ([`DiskQueue::take_late`]).
    #[cold]
    pub fn take_answers<E: Engine>(&mut self, engine: &mut E) {
        let (mut owner, _) = self.owner(engine);
        owner.slow.take_answers(&mut owner.dispatch);
    }
}
