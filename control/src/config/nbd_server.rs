//! Disks of NBD servers: how these are reached.

use super::seconds::seconds;
use super::source::{is_unreal, source};
use super::{DiskArgs, DiskSpec};
use ringway_disk::Source;
use ringway_nbd_client::{Connections, Target};
use std::path::Path;

impl DiskSpec {
    /// The export that holds its data, or what it is based on.
    pub fn export(&self) -> Option<&Target> {
        self.source.export().or_else(|| self.base_export.as_ref()?.export())
    }
}

impl DiskArgs {
    /// What the image's word names, and the export that it is based on, if it is.
    ///
    /// # Errors
    /// As [`DiskArgs::of_server`].
    pub(super) fn sources(
        &self,
        image: &Path,
        queues: u16,
    ) -> Result<(Source, Option<Source>), String> {
        let its = self.source_with_access(image)?;
        let Some(base) = self.base.as_deref().filter(|base| is_unreal(base)) else {
            return Ok((self.of_server(its, image, queues)?, None));
        };
        let Source::Nbd(target) = self.of_server(source(base)?, base, queues)? else {
            return Ok((its, None));
        };
        // One for what is written in part, beside those of workers.
        let Connections { most, asked } = target.connections();
        let most = if asked { most.max(2) } else { most + 1 };
        Ok((its, Some(Source::Nbd(target.with_connections(Connections { most, asked })))))
    }

    /// The same disk, reached as was said, or for `queues` queues as seems best.
    ///
    /// # Errors
    /// Words for servers, of what is no disk of one.
    pub(super) fn of_server(
        &self,
        source: Source,
        image: &Path,
        queues: u16,
    ) -> Result<Source, String> {
        let Source::Nbd(target) = source else {
            let said = [
                (self.reconnect_timeout.is_some(), "reconnect-timeout"),
                (self.connect_timeout.is_some(), "connect-timeout"),
                (self.response_timeout.is_some(), "response-timeout"),
                (self.nbd_connections.is_some(), "nbd-connections"),
            ];
            return match said.into_iter().find(|(said, _)| *said) {
                Some((_, word)) => Err(format!(
                    "{} is no disk of an NBD server: {word} is for those",
                    image.display()
                )),
                None => Ok(source),
            };
        };
        let connections = self.nbd_connections.map(Connections::asked);
        let connections = connections.unwrap_or_else(|| Connections::of_queues(queues));
        let target = target.with_connections(connections);
        Ok(Source::Nbd(match self.connect_timeout {
            Some(limit) => target.with_connect_timeout(seconds(limit)),
            None => target,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Place;
    use super::*;
    use std::time::Duration;

    fn spec(image: &str, toml: &str) -> Result<Source, String> {
        let args: DiskArgs = toml::from_str(toml).map_err(|error| error.to_string())?;
        let place = Place::Socket("/run/s".into());
        args.into_spec(Path::new(image), place).map(|spec| spec.source)
    }

    #[test]
    fn a_server_has_a_connection_for_each_queue_within_bounds() {
        let target = |toml: &str| match spec("nbd:unix:/run/n.sock", toml) {
            Ok(Source::Nbd(target)) => target,
            other => panic!("{other:?}"),
        };
        for (toml, most, asked) in [
            ("queues = 1", 1, false),
            ("queues = 3", 3, false),
            ("queues = 16", 4, false),
            ("queues = 1\nnbd-connections = 7", 7, true),
        ] {
            assert_eq!(target(toml).connections(), Connections { most, asked }, "{toml}");
        }
        assert_eq!(target("").connect_timeout(), Duration::from_secs(10));
        assert_eq!(target("connect-timeout = 3").connect_timeout(), Duration::from_secs(3));
    }

    #[test]
    fn what_is_for_servers_is_refused_of_files() {
        for word in ["reconnect-timeout", "connect-timeout", "response-timeout", "nbd-connections"]
        {
            let error = spec("/srv/disk.img", &format!("{word} = 1")).unwrap_err();
            assert_eq!(
                error,
                format!("/srv/disk.img is no disk of an NBD server: {word} is for those")
            );
        }
        for number in ["0", "65", "99999999"] {
            let error = spec("nbd:unix:/x", &format!("nbd-connections = {number}")).unwrap_err();
            assert!(error.contains("1 to 64 connections"), "{error}");
        }
    }
}
