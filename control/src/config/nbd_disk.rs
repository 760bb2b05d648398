//! Disks that are offered to NBD clients: where that is said.

use super::{DiskArgs, NbdAddress, NbdPlace, SocketRule};
use std::path::Path;

/// NBD connections at a time, unless it is said.
const CONNECTIONS: u16 = 16;

impl DiskArgs {
    /// Takes the place where NBD clients find `image`, if one was named; its connections are its
    /// queues.
    ///
    /// # Errors
    /// Words of other transports, or words of this one without a place.
    pub fn take_nbd(&mut self, image: &Path) -> Result<Option<NbdPlace>, String> {
        let Some(address) = self.nbd.clone() else {
            return match (&self.export, self.connections) {
                (Some(_), _) => Err("export names a disk of NBD clients: add nbd".into()),
                (_, Some(_)) => Err("connections are those of NBD clients: add nbd".into()),
                _ => Ok(None),
            };
        };
        let refused = [
            (self.socket.is_some(), "socket: a disk has one place, and nbd names it"),
            (self.queues.is_some(), "queues: each NBD connection is a queue; see connections"),
            (self.queue_size.is_some(), "queue-size: NBD has no rings"),
            (self.incoming, "incoming: guests are migrated over vhost-user"),
            (
                self.isolate == Some(true),
                "isolate: a disk of NBD clients has no process of its own",
            ),
        ];
        if let Some((_, why)) = refused.into_iter().find(|(said, _)| *said) {
            return Err(why.into());
        }
        let rule = SocketRule { mode: self.socket_mode, group: self.socket_group.clone() };
        if matches!(address, NbdAddress::Tcp(_)) && rule != SocketRule::default() {
            return Err("socket-mode and socket-group are for Unix sockets".into());
        }
        self.queues = Some(self.connections.unwrap_or(CONNECTIONS));
        let name = || image.file_name().unwrap_or(image.as_os_str()).to_string_lossy().into_owned();
        let export = self.export.clone().unwrap_or_else(name);
        Ok(Some(NbdPlace { address, export }))
    }
}
