//! The first request of a process that uses an export: a flush. What an earlier one had answered, and nobody had
//! flushed, is durable from then on, so a server that is started anew later has not lost it unnoticed.

use crate::connect::{Deadline, Patient};
use crate::handshake::Negotiated;
use crate::reply::{Reply, parse};
use ringway_nbd_words::{REQUEST_MAGIC, command, offers};
use std::fs::File;
use std::io::{self, Read, Write};
use std::time::Duration;

/// The longest reply that is read: an error with its text.
const REPLY_MAX: usize = 8 << 10;

/// No engine calls a request so: of one place it would be the last use of 4 billion.
const COOKIE: u64 = u64::MAX;

/// Asks for a flush by a connection that nothing else is asked of, and waits for its end. False if the server
/// fails it; true also where there is none to be asked for.
///
/// # Errors
/// What the host says, also of a server that does not answer within `limit` or breaks the rules: the connection
/// is of no use then.
pub(crate) fn flush(socket: &File, facts: &Negotiated, limit: Duration) -> io::Result<bool> {
    if !facts.offers(offers::SEND_FLUSH) {
        return Ok(true);
    }
    let deadline = Deadline::new(limit, "response-timeout");
    let mut stream = Patient { socket: socket.try_clone()?, deadline };
    let mut head = REQUEST_MAGIC.to_be_bytes().to_vec();
    head.extend(0u16.to_be_bytes());
    head.extend(command::FLUSH.to_be_bytes());
    head.extend(COOKIE.to_be_bytes());
    head.extend([0; 12]);
    stream.write_all(&head)?;
    let (mut bytes, mut failed) = (Vec::new(), false);
    loop {
        match parse(&bytes, facts.structured).map_err(violation)? {
            Some((Reply::Done { cookie: COOKIE, error, .. }, len)) if len == bytes.len() => {
                return Ok(error == 0 && !failed);
            }
            Some((Reply::Failed { cookie: COOKIE, .. }, len)) => {
                failed = true;
                bytes.drain(..len);
            }
            Some(_) => return Err(violation("it answers what was not asked")),
            None if bytes.len() > REPLY_MAX => return Err(violation("its reply has no end")),
            None => {
                let mut part = [0; 512];
                let got = stream.read(&mut part)?;
                if got == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                bytes.extend_from_slice(&part[..got]);
            }
        }
    }
}

fn violation(what: &str) -> io::Error {
    io::Error::other(format!("the server does not keep to the protocol: {what}"))
}
