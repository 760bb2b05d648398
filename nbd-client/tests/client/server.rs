//! A server that does what a test has it do.

use ringway_nbd_words::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, IHAVEOPT, NBDMAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC,
    SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, answer, chunk, command, info, offers, option,
};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// All that a server can offer but to be read-only.
pub(crate) const ALL: u16 = offers::HAS_FLAGS
    | offers::SEND_FLUSH
    | offers::SEND_FUA
    | offers::SEND_TRIM
    | offers::SEND_WRITE_ZEROES;

/// What it says of its export.
#[derive(Clone, Copy)]
pub(crate) struct Facts {
    pub(crate) bytes: u64,
    pub(crate) flags: u16,
    pub(crate) structured: bool,
    pub(crate) blocks: Option<[u32; 3]>,
    /// What it calls `base:allocation`, if it has it.
    pub(crate) context: Option<u32>,
    /// What it calls its export, if it tells.
    pub(crate) name: Option<&'static str>,
}

pub(crate) const FACTS: Facts =
    Facts { bytes: 1 << 20, flags: ALL, structured: true, blocks: None, context: None, name: None };

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) flags: u16,
    pub(crate) kind: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) data: Vec<u8>,
}

/// One connection, after the handshake.
pub(crate) struct Conn {
    pub(crate) stream: UnixStream,
    pub(crate) disk: Arc<Mutex<Vec<u8>>>,
    pub(crate) facts: Facts,
}

/// A server that listens; `serve` gets each connection and its number.
pub(crate) struct Server {
    pub(crate) path: PathBuf,
    pub(crate) disk: Arc<Mutex<Vec<u8>>>,
}

impl Server {
    pub(crate) fn start(
        dir: &Path,
        facts: impl Fn(usize) -> Facts + Send + 'static,
        serve: impl Fn(usize, &mut Conn) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let path = dir.join("server.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let disk = Arc::new(Mutex::new(vec![0; 1 << 20]));
        let (shared, serve) = (Arc::clone(&disk), Arc::new(serve));
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (disk, serve) = (Arc::clone(&shared), Arc::clone(&serve));
                let (mut stream, facts) = (stream.unwrap(), facts(number));
                std::thread::spawn(move || {
                    if greet(&mut stream, facts).is_ok() {
                        // A client that goes is no failure of a test.
                        let _ = serve(number, &mut Conn { stream, disk, facts });
                    }
                });
            }
        });
        Self { path, disk }
    }
}

/// Shakes hands as an honest server does.
pub(crate) fn greet(stream: &mut UnixStream, facts: Facts) -> io::Result<()> {
    let mut hello = [NBDMAGIC.to_be_bytes(), IHAVEOPT.to_be_bytes()].concat();
    hello.extend((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    stream.write_all(&hello)?;
    take::<4>(stream)?;
    loop {
        let head = take::<16>(stream)?;
        let option = u32::from_be_bytes(head[8..12].try_into().unwrap());
        let mut data = vec![0; u32::from_be_bytes(head[12..].try_into().unwrap()) as usize];
        stream.read_exact(&mut data)?;
        match option {
            option::STRUCTURED_REPLY if facts.structured => {
                reply(stream, option, answer::ACK, &[])?
            }
            option::SET_META_CONTEXT if facts.context.is_some() => {
                assert!(data.ends_with(b"\0\0\0\x01\0\0\0\x0fbase:allocation"), "{data:?}");
                let id = facts.context.unwrap_or(0).to_be_bytes();
                let context = [&id[..], b"base:allocation"].concat();
                reply(stream, option, answer::META_CONTEXT, &context)?;
                reply(stream, option, answer::ACK, &[])?;
            }
            option::GO => {
                let mut export = info::EXPORT.to_be_bytes().to_vec();
                export.extend(facts.bytes.to_be_bytes());
                export.extend(facts.flags.to_be_bytes());
                reply(stream, option, answer::INFO, &export)?;
                if let Some(name) = facts.name {
                    assert!(data.ends_with(b"\0\x02\0\x01\0\x03"), "it asks for it: {data:?}");
                    let name = [&info::NAME.to_be_bytes()[..], name.as_bytes()].concat();
                    reply(stream, option, answer::INFO, &name)?;
                }
                if let Some(blocks) = facts.blocks {
                    let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
                    blocks.iter().for_each(|block| sizes.extend(block.to_be_bytes()));
                    reply(stream, option, answer::INFO, &sizes)?;
                }
                return reply(stream, option, answer::ACK, &[]);
            }
            _ => reply(stream, option, answer::ERR_UNSUP, &[])?,
        }
    }
}

pub(crate) fn reply(
    stream: &mut UnixStream,
    option: u32,
    kind: u32,
    data: &[u8],
) -> io::Result<()> {
    stream.write_all(&reply_bytes(option, kind, data))
}

pub(crate) fn reply_bytes(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    for word in [option, kind, u32::try_from(data.len()).unwrap()] {
        bytes.extend(word.to_be_bytes());
    }
    bytes.extend(data);
    bytes
}

pub(crate) fn take<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

impl Conn {
    pub(crate) fn asked(&mut self) -> io::Result<Asked> {
        let head = take::<28>(&mut self.stream)?;
        let number = |at: usize, len: usize| {
            head[at..at + len].iter().fold(0u64, |number, &byte| number << 8 | u64::from(byte))
        };
        assert_eq!(number(0, 4), u64::from(REQUEST_MAGIC), "a request begins as one");
        let kind = u16::try_from(number(6, 2)).unwrap();
        let len = u32::try_from(number(24, 4)).unwrap();
        let mut data = vec![0; if kind == command::WRITE { len as usize } else { 0 }];
        self.stream.read_exact(&mut data)?;
        let flags = u16::try_from(number(4, 2)).unwrap();
        Ok(Asked { flags, kind, cookie: number(8, 8), offset: number(16, 8), len, data })
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    pub(crate) fn simple(&mut self, cookie: u64, error: u32) -> io::Result<()> {
        let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        self.send(&bytes)
    }

    pub(crate) fn chunk(
        &mut self,
        last: bool,
        kind: u16,
        cookie: u64,
        data: &[u8],
    ) -> io::Result<()> {
        self.send(&chunk_bytes(last, kind, cookie, data))
    }

    /// A piece of a read, as the disk has it.
    pub(crate) fn data(
        &mut self,
        last: bool,
        cookie: u64,
        offset: u64,
        len: usize,
    ) -> io::Result<()> {
        let at = usize::try_from(offset).unwrap();
        let bytes = self.disk.lock().unwrap()[at..at + len].to_vec();
        let data = [&offset.to_be_bytes()[..], &bytes].concat();
        self.chunk(last, chunk::OFFSET_DATA, cookie, &data)
    }

    /// Does what is asked and answers it.
    pub(crate) fn carry_out(&mut self, asked: &Asked) -> io::Result<()> {
        let (at, len) = (usize::try_from(asked.offset).unwrap(), asked.len as usize);
        match asked.kind {
            command::READ if self.facts.structured => {
                return self.data(true, asked.cookie, asked.offset, len);
            }
            command::READ => {
                let bytes = self.disk.lock().unwrap()[at..at + len].to_vec();
                self.simple(asked.cookie, 0)?;
                return self.send(&bytes);
            }
            command::WRITE => {
                self.disk.lock().unwrap()[at..at + len].copy_from_slice(&asked.data);
            }
            command::WRITE_ZEROES if self.facts.bytes <= 1 << 20 => {
                self.disk.lock().unwrap()[at..at + len].fill(0);
            }
            _ => {}
        }
        self.simple(asked.cookie, 0)
    }

    /// Goes on as an honest server does.
    pub(crate) fn serve(&mut self) -> io::Result<()> {
        loop {
            let asked = self.asked()?;
            self.carry_out(&asked)?;
        }
    }
}

pub(crate) fn chunk_bytes(last: bool, kind: u16, cookie: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend((if last { chunk::FLAG_DONE } else { 0 }).to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    bytes.extend(data);
    bytes
}
