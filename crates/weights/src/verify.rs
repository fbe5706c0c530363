//! Reading every byte of a checkpoint again and comparing it with its digests.

use std::path::Path;

use crate::bytes::{Buffers, DataFile, Folder};
use crate::checkpoint::{Checkpoint, CheckpointKind};
use crate::error::WeightsError;
use crate::manifest::{self, JOURNAL, MANIFEST, Manifest, RESERVED, damaged};
use crate::packed::{ExpertLayer, Packed};
use crate::scan::{Scanner, Stream};

/// What a verification looked at and found good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// Kind of the checkpoint.
    pub kind: CheckpointKind,
    /// Whether only headers and byte ranges were checked: safetensors folders carry no digests.
    pub headers_only: bool,
    /// Bytes that were read and compared with digests.
    pub bytes: u64,
    /// Tensors checked.
    pub tensors: u64,
    /// Expert records checked.
    pub records: u64,
    /// Names in the folder that do not belong to the container.
    pub unlisted: Vec<String>,
}

/// Checks all of a packed checkpoint: every tensor, every record, all padding, the digests, the
/// sidecars and the manifest. Safetensors folders carry no digests, so of those only headers and
/// byte ranges are checked again, and the report says so.
///
/// **Units.** `progress(done, total)` counts bytes.
///
/// # Errors
///
/// The first damage: [`WeightsError::Digest`] or [`WeightsError::Padding`] with file, tensor or
/// expert and byte range; and whatever [`Checkpoint::open`] reports.
pub fn verify(
    checkpoint: &Checkpoint,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, WeightsError> {
    match checkpoint.kind() {
        CheckpointKind::HuggingFace => {
            let tensors = checkpoint.reread_headers()?;
            progress(0, 0);
            Ok(VerifyReport {
                kind: CheckpointKind::HuggingFace,
                headers_only: true,
                bytes: 0,
                tensors,
                records: 0,
                unlisted: Vec::new(),
            })
        }
        CheckpointKind::Packed => verify_packed(checkpoint.folder(), progress),
    }
}

fn verify_packed(
    folder: &Folder,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, WeightsError> {
    let buffers = Buffers::default();
    // Opens anew: checks the manifest, all lengths and the list of digests.
    let opened = manifest::open(folder, &buffers)?;
    let manifest = &*opened.packed.manifest;
    let small = manifest.digests.len + manifest.sidecars.iter().map(|s| s.len).sum::<u64>();
    let total = manifest.trunk.len + manifest.experts.len + small;
    let mut done = 0;
    let mut tick = |bytes: u64| {
        done += bytes;
        progress(done, total);
    };
    tick(manifest.digests.len);
    for sidecar in &manifest.sidecars {
        let file = folder.require(&sidecar.name)?;
        let got = Scanner::new(&file, &buffers).digest(0..file.len, |_| {})?;
        if got != sidecar.blake3 {
            let whole = (file.path.as_path(), 0..file.len);
            return Err(damaged(whole, format!("`{}`", sidecar.name), sidecar.blake3, got));
        }
        tick(sidecar.len);
    }
    verify_trunk(manifest, &opened.files[0], &buffers, &mut tick)?;
    verify_experts(&opened.packed, &opened.files[1], &buffers, &mut tick)?;
    let known = |name: &String| {
        name != JOURNAL && RESERVED.contains(&name.as_str())
            || manifest.sidecars.iter().any(|s| s.name == *name)
    };
    let manifest_bytes = folder.require(MANIFEST)?.len;
    Ok(VerifyReport {
        kind: CheckpointKind::Packed,
        headers_only: false,
        bytes: total + manifest_bytes,
        tensors: manifest.tensors.len() as u64,
        records: manifest.experts.records,
        unlisted: folder.names()?.into_iter().filter(|name| !known(name)).collect(),
    })
}

fn verify_trunk(
    manifest: &Manifest,
    file: &DataFile,
    buffers: &Buffers,
    tick: &mut impl FnMut(u64),
) -> Result<(), WeightsError> {
    let mut scanner = Scanner::new(file, buffers);
    let mut stream = Stream::default();
    let mut end = 0;
    let mut before = "the start".to_owned();
    for tensor in &manifest.tensors {
        expect_zeros(&mut scanner, end..tensor.offset, || before.clone())?;
        stream.pad_to(tensor.offset);
        let range = tensor.offset..tensor.offset + tensor.len;
        let got = scanner.digest(range.clone(), |bytes| {
            stream.update(bytes);
            tick(bytes.len() as u64);
        })?;
        before = format!("tensor `{}`", tensor.name);
        if got != tensor.blake3 {
            return Err(damaged((&file.path, range), before, tensor.blake3, got));
        }
        tick(tensor.offset - end);
        end = range.end;
    }
    let got = stream.digest();
    if got != manifest.trunk.blake3 {
        let whole = (file.path.as_path(), 0..file.len);
        return Err(damaged(whole, "the trunk as a whole".into(), manifest.trunk.blake3, got));
    }
    Ok(())
}

fn verify_experts(
    packed: &Packed,
    file: &DataFile,
    buffers: &Buffers,
    tick: &mut impl FnMut(u64),
) -> Result<(), WeightsError> {
    let mut scanner = Scanner::new(file, buffers);
    let mut digests = packed.digests.iter();
    for layer in packed.expert_layers() {
        for expert in 0..layer.n_experts {
            let wanted = digests.next().expect("open checked the number of digests");
            verify_record(&mut scanner, layer, expert, *wanted)?;
            tick(layer.stride);
        }
    }
    Ok(())
}

fn verify_record(
    scanner: &mut Scanner<'_>,
    layer: &ExpertLayer,
    expert: u32,
    wanted: [u8; 32],
) -> Result<(), WeightsError> {
    let start = layer.record_offset(expert);
    let end = start + layer.record_bytes;
    let subject = || format!("expert `{expert}` of layer `{}`", layer.layer);
    let got = scanner.digest(start..end, |_| {})?;
    if got.0 != wanted {
        let wanted = crate::digest::Digest(wanted);
        return Err(damaged((&scanner.file.path, start..end), subject(), wanted, got));
    }
    expect_zeros(scanner, end..start + layer.stride, subject)
}

fn expect_zeros(
    scanner: &mut Scanner<'_>,
    range: std::ops::Range<u64>,
    subject: impl FnOnce() -> String,
) -> Result<(), WeightsError> {
    let path: &Path = &scanner.file.path;
    match scanner.first_nonzero(range)? {
        None => Ok(()),
        Some((offset, got)) => {
            Err(WeightsError::Padding { path: path.to_owned(), subject: subject(), offset, got })
        }
    }
}
