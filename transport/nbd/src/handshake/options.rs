//! What each option does.

use super::{Handshake, HandshakeError, Negotiated, Next, Replies, TlsRule, u32_at};
use crate::offer::Offer;
use crate::protocol::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, OPTION_REPLY_MAGIC, PAYLOAD_MAX, answer, info, option,
};

/// The data of an option that does not say what it should.
struct Malformed;

/// The data of an option, taken piece by piece.
struct Data<'a>(&'a [u8]);

impl<'a> Data<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        let bytes = self.bytes(2)?;
        Ok(u16::from(bytes[0]) << 8 | u16::from(bytes[1]))
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32_at(self.bytes(4)?, 0))
    }

    /// A text with its length before it.
    fn text(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()?;
        self.bytes(len as usize)
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

impl Handshake<'_> {
    pub(super) fn carry_out(
        &mut self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Next, HandshakeError> {
        let known = option == option::STARTTLS || option == option::ABORT;
        if self.tls == TlsRule::Required && !known {
            if option == option::EXPORT_NAME {
                return Err(HandshakeError::NoTls);
            }
            refuse(out, option, answer::ERR_TLS_REQD, "this server needs TLS");
            return Ok(Next::More);
        }
        match option {
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                reply(out, option, answer::ACK, &[]);
                return Ok(Next::Abort);
            }
            option::LIST => self.list(data, out),
            option::INFO | option::GO => match self.info(option, data, out) {
                Ok(Some(export)) if option == option::GO => return Ok(self.begin(export)),
                Ok(_) => {}
                Err(Malformed) => refuse(out, option, answer::ERR_INVALID, "malformed request"),
            },
            option::STRUCTURED_REPLY => self.structured(data, out),
            option::EXTENDED_HEADERS => self.extended(data, out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                if self.contexts(option, data, out).is_err() {
                    refuse(out, option, answer::ERR_INVALID, "malformed request");
                }
            }
            option::STARTTLS => return Ok(self.start_tls(data, out)),
            _ => refuse(out, option, answer::ERR_UNSUP, "this server does not know this option"),
        }
        Ok(Next::More)
    }

    fn start_tls(&self, data: &[u8], out: &mut Vec<u8>) -> Next {
        let (kind, why) = match self.tls {
            TlsRule::None => (answer::ERR_POLICY, "this server has no TLS"),
            TlsRule::Begun => (answer::ERR_INVALID, "this is TLS already"),
            _ if !data.is_empty() => (answer::ERR_INVALID, "this option has no data"),
            TlsRule::Possible | TlsRule::Required => {
                reply(out, option::STARTTLS, answer::ACK, &[]);
                return Next::StartTls;
            }
        };
        refuse(out, option::STARTTLS, kind, why);
        Next::More
    }

    fn begin(&self, export: usize) -> Next {
        let block_status = self.context_of == Some(export) && self.replies != Replies::Simple;
        Next::Begin(Negotiated { export, replies: self.replies, block_status })
    }

    /// The export that was agreed upon ([`Next::Begin`]) takes nobody more: what is sent instead of the answer
    /// is at the end of `out`. The client may choose another one.
    ///
    /// # Errors
    /// [`HandshakeError::NoPlace`] where there is no such answer: the connection ends.
    pub fn has_no_place(&self, out: &mut Vec<u8>) -> Result<Next, HandshakeError> {
        if self.option == option::EXPORT_NAME {
            return Err(HandshakeError::NoPlace);
        }
        let why = "all connections that this export may have are taken";
        refuse(out, self.option, answer::ERR_POLICY, why);
        Ok(Next::More)
    }

    /// The disk that a client means.
    fn find(&self, name: &[u8]) -> Option<(usize, &Offer)> {
        let find = |means: &dyn Fn(&Offer) -> bool| {
            self.offers.iter().enumerate().find(|(_, offer)| means(offer))
        };
        let named = find(&|offer| offer.name.as_bytes() == name);
        named.or_else(|| find(&|offer| name.is_empty() && offer.nameless))
    }

    fn export_name(&self, name: &[u8], out: &mut Vec<u8>) -> Result<Next, HandshakeError> {
        let (at, offer) = self.find(name).ok_or(HandshakeError::NoSuchExport)?;
        out.extend_from_slice(&offer.bytes.to_be_bytes());
        out.extend_from_slice(&offer.flags().to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Ok(self.begin(at))
    }

    fn list(&self, data: &[u8], out: &mut Vec<u8>) {
        if !data.is_empty() {
            return refuse(out, option::LIST, answer::ERR_INVALID, "this option has no data");
        }
        for offer in self.offers {
            reply(
                out,
                option::LIST,
                answer::SERVER,
                &[&text_len(&offer.name), offer.name.as_bytes()],
            );
        }
        reply(out, option::LIST, answer::ACK, &[]);
    }

    /// Tells of an export; which one, if it is known.
    fn info(
        &self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<usize>, Malformed> {
        let mut data = Data(data);
        let name = data.text()?;
        let (mut wants_name, mut wants_description) = (false, false);
        for _ in 0..data.u16()? {
            match data.u16()? {
                info::NAME => wants_name = true,
                info::DESCRIPTION => wants_description = true,
                _ => {}
            }
        }
        data.end()?;
        let Some((at, offer)) = self.find(name) else {
            refuse(out, option, answer::ERR_UNKNOWN, "there is no such export");
            return Ok(None);
        };
        let mut tell = |kind: u16, parts: [&[u8]; 3]| {
            reply(out, option, answer::INFO, &[&kind.to_be_bytes(), parts[0], parts[1], parts[2]]);
        };
        let (bytes, flags) = (offer.bytes.to_be_bytes(), offer.flags().to_be_bytes());
        tell(info::EXPORT, [&bytes, &flags, &[]]);
        if wants_name {
            tell(info::NAME, [offer.name.as_bytes(), &[], &[]]);
        }
        if wants_description && !offer.description.is_empty() {
            tell(info::DESCRIPTION, [offer.description.as_bytes(), &[], &[]]);
        }
        let blocks = [offer.min_block, offer.preferred_block, PAYLOAD_MAX].map(u32::to_be_bytes);
        tell(info::BLOCK_SIZE, [&blocks[0], &blocks[1], &blocks[2]]);
        reply(out, option, answer::ACK, &[]);
        Ok(Some(at))
    }

    fn structured(&mut self, data: &[u8], out: &mut Vec<u8>) {
        let option = option::STRUCTURED_REPLY;
        if !data.is_empty() {
            return refuse(out, option, answer::ERR_INVALID, "this option has no data");
        }
        if self.replies == Replies::Extended {
            let why = "extended headers are agreed upon already";
            return refuse(out, option, answer::ERR_EXT_HEADER_REQD, why);
        }
        self.replies = Replies::Structured;
        reply(out, option, answer::ACK, &[]);
    }

    fn extended(&mut self, data: &[u8], out: &mut Vec<u8>) {
        let option = option::EXTENDED_HEADERS;
        if !data.is_empty() {
            return refuse(out, option, answer::ERR_INVALID, "this option has no data");
        }
        self.replies = Replies::Extended;
        reply(out, option, answer::ACK, &[]);
    }

    fn contexts(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            self.context_of = None;
        }
        if self.replies == Replies::Simple {
            refuse(out, option, answer::ERR_INVALID, "agree upon structured replies first");
            return Ok(());
        }
        let mut data = Data(data);
        let name = data.text()?;
        let queries = data.u32()?;
        // Without a query all there is, to who lists; nothing, to who chooses.
        let mut chosen = queries == 0 && !sets;
        for _ in 0..queries {
            let query = data.text()?;
            chosen |= query == BASE_ALLOCATION.as_bytes() || (!sets && query == b"base:");
        }
        data.end()?;
        let Some((at, _)) = self.find(name) else {
            refuse(out, option, answer::ERR_UNKNOWN, "there is no such export");
            return Ok(());
        };
        if chosen {
            let number = if sets { BASE_ALLOCATION_ID } else { 0 };
            let number = number.to_be_bytes();
            reply(out, option, answer::META_CONTEXT, &[&number, BASE_ALLOCATION.as_bytes()]);
            if sets {
                self.context_of = Some(at);
            }
        }
        reply(out, option, answer::ACK, &[]);
        Ok(())
    }
}

/// The length of a text, as it goes before it.
fn text_len(text: &str) -> [u8; 4] {
    u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes()
}

fn reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

fn refuse(out: &mut Vec<u8>, option: u32, kind: u32, why: &str) {
    reply(out, option, kind, &[why.as_bytes()]);
}
