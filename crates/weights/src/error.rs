//! Everything that can be wrong with weights on disk.
//!
//! Messages are lower case, name the file or tensor, give what was expected and what was found in
//! backticks, and end with a hint on its own line where there is something to do.

use std::io;
use std::path::{Path, PathBuf};

use crate::encoding::Encoding;

/// Why weights could not be opened, read, packed or verified.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The operating system refused something.
    #[error("could not {action} `{}`: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, a verb.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// No room to write; what is written so far stays.
    #[error(
        "no room for `{wanted}` bytes at offset `{offset}` of `{}`: {source}\n\
         hint: free some space and run the same command again, it continues where it stopped",
        path.display()
    )]
    DiskFull {
        /// The file that could not grow.
        path: PathBuf,
        /// Where the write started.
        offset: u64,
        /// Bytes of the write.
        wanted: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The file ends before the bytes asked for.
    #[error(
        "`{}` gave `{got}` of the `{wanted}` bytes at offset `{offset}`\n\
         hint: the file is shorter than when it was opened, or the range never lay inside it",
        path.display()
    )]
    ShortRead {
        /// The file.
        path: PathBuf,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that were there.
        got: u64,
    },
    /// Nothing at that path.
    #[error("`{}` does not exist", path.display())]
    NotFound {
        /// The path asked for.
        path: PathBuf,
    },
    /// Only the unfinished half of a pack is there.
    #[error(
        "`{}` is an unfinished pack\nhint: run the same `pack` command again to finish it, or \
         remove the folder",
        path.display()
    )]
    UnfinishedPack {
        /// The folder with the unfinished pack.
        path: PathBuf,
    },
    /// A file where a folder is needed.
    #[error("`{}` is a file, expected a folder{hint}", path.display())]
    NotAFolder {
        /// The path asked for.
        path: PathBuf,
        /// Empty, or a line with advice.
        hint: &'static str,
    },
    /// A folder that holds neither kind of checkpoint.
    #[error(
        "`{}` holds no model: expected `config.json` with `model.safetensors` or \
         `model.safetensors.index.json`, or the `manifest.json` of a packed model; found {}{hint}",
        path.display(), listed(found)
    )]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
        /// The first few names in it.
        found: Vec<String>,
        /// Empty, or a line with advice.
        hint: &'static str,
    },
    /// A file that the format requires.
    #[error("`{}` has no `{name}`", folder.display())]
    MissingFile {
        /// The folder searched.
        folder: PathBuf,
        /// The file's name.
        name: String,
    },
    /// More than we agree to read into memory at once.
    #[error("`{}` has `{got}` bytes, expected at most `{limit}`", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most we read.
        limit: u64,
        /// Its length.
        got: u64,
    },
    /// A file's length is not what the container says.
    #[error("`{}` has `{got}` bytes, expected `{wanted}`", path.display())]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Bytes the manifest promises.
        wanted: u64,
        /// Bytes there.
        got: u64,
    },
    /// Not JSON, or not of the expected form.
    #[error("`{}` line `{line}` column `{column}`: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1 (0: the start of the line).
        column: usize,
        /// What the parser said.
        reason: String,
    },
    /// JSON whose outermost value has the wrong type.
    #[error("`{}` is {found}, expected an object", path.display())]
    NotAnObject {
        /// The file.
        path: PathBuf,
        /// The type found.
        found: &'static str,
    },

    // safetensors
    /// Not even room for the length of a header.
    #[error(
        "`{}` {}, expected a safetensors file, which begins with a header\n\
         hint: the download was interrupted, fetch the file again",
        path.display(),
        if *got == 0 { "is empty".into() } else { format!("has only `{got}` bytes") }
    )]
    NoHeader {
        /// The shard.
        path: PathBuf,
        /// Its length.
        got: u64,
    },
    /// A header that is no JSON, or not of the expected form.
    #[error(
        "the header of `{}` is broken at line `{line}` column `{column}`: {reason}\n\
         hint: the file is damaged, fetch it again",
        path.display()
    )]
    Header {
        /// The shard.
        path: PathBuf,
        /// Line of the header, from 1.
        line: usize,
        /// Column, from 1 (0: the start of the line).
        column: usize,
        /// What the parser said.
        reason: String,
    },
    /// A header length that the file cannot hold or that no checkpoint needs.
    #[error(
        "`{}` claims a header of `{got}` bytes, expected at most `{limit}`{hint}",
        path.display()
    )]
    HeaderLength {
        /// The shard.
        path: PathBuf,
        /// The most that this file could have.
        limit: u64,
        /// The claim.
        got: u64,
        /// Empty, or a line with advice.
        hint: &'static str,
    },
    /// A tensor's bytes lie outside the file or run backwards.
    #[error(
        "tensor `{tensor}` in `{}` lies at bytes `{start}..{end}`, expected a range inside \
         `0..{limit}`{hint}",
        path.display()
    )]
    Extent {
        /// The shard.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// First byte, in the data section.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Bytes of the data section.
        limit: u64,
        /// Empty, or a line with advice.
        hint: &'static str,
    },
    /// A tensor's bytes do not match its shape and type.
    #[error(
        "tensor `{tensor}` in `{}` has `{got}` bytes, expected `{wanted}` for `{dtype}` \
         `{shape:?}`",
        path.display()
    )]
    TensorBytes {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Its dtype as the file says.
        dtype: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes the shape needs.
        wanted: u64,
        /// Bytes the file gives it.
        got: u64,
    },
    /// A shape with a zero, or whose size is no 64-bit number.
    #[error("tensor `{tensor}` in `{}` has the impossible shape `{shape:?}`", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Its shape as the file says.
        shape: Vec<u64>,
    },
    /// Two tensors share bytes.
    #[error(
        "tensor `{tensor}` in `{}` starts at byte `{start}`, inside `{other}` which ends at \
         `{other_end}`",
        path.display()
    )]
    Overlap {
        /// The file.
        path: PathBuf,
        /// The later tensor.
        tensor: String,
        /// Its first byte.
        start: u64,
        /// The tensor it collides with.
        other: String,
        /// One past that tensor's last byte.
        other_end: u64,
    },
    /// Bytes that no tensor claims: the file is too long, or its header wrong.
    #[error(
        "`{}` has data bytes `{start}..{end}` that belong to no tensor, expected none (`{}` bytes)",
        path.display(), end - start
    )]
    Unclaimed {
        /// The shard.
        path: PathBuf,
        /// First such byte of the data section.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// A name that occurs twice.
    #[error(
        "tensor `{tensor}` is in `{}` and again in `{}`, expected once",
        first.display(), second.display()
    )]
    DuplicateTensor {
        /// Name of the tensor.
        tensor: String,
        /// Where it was first.
        first: PathBuf,
        /// Where it is again.
        second: PathBuf,
    },
    /// A shard name that is no plain file name.
    #[error(
        "`{}` puts tensor `{tensor}` into `{shard}`, expected the name of a file beside it",
        index.display()
    )]
    ShardName {
        /// The index file.
        index: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The shard name.
        shard: String,
    },
    /// A shard that the index names and the folder lacks.
    #[error(
        "`{}` puts tensor `{tensor}` into `{shard}`, which does not exist\n\
         hint: the download is incomplete",
        index.display()
    )]
    ShardMissing {
        /// The index file.
        index: PathBuf,
        /// A tensor of that shard.
        tensor: String,
        /// The shard name.
        shard: String,
    },
    /// A tensor that is not where the index says.
    #[error(
        "`{}` puts tensor `{tensor}` into `{expected}`, found it in {}",
        index.display(), found.as_ref().map_or("no shard".into(), |f| format!("`{f}`"))
    )]
    ShardContent {
        /// The index file.
        index: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The shard the index names.
        expected: String,
        /// The shard that holds it, if any does.
        found: Option<String>,
    },

    // what a model asks for
    /// A tensor that the model needs and the checkpoint lacks.
    #[error("tensor `{tensor}` is missing from `{origin}`, expected shape `{expected:?}`")]
    MissingTensor {
        /// Where the checkpoint came from.
        origin: String,
        /// Name of the tensor.
        tensor: String,
        /// The shape the model needs.
        expected: Vec<usize>,
    },
    /// A tensor of another shape than the model needs.
    #[error(
        "tensor `{tensor}` in `{}` has shape `{found:?}`, expected `{expected:?}`",
        path.display()
    )]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The shape the model needs.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor that the model needs, in a type we cannot compute with.
    #[error(
        "tensor `{tensor}` in `{}` has dtype `{found}`, expected one of `F32`, `F16`, `BF16`",
        path.display()
    )]
    UnusableDtype {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The dtype as the file says.
        found: String,
    },

    /// A tensor that goes with others, in another type than they need.
    #[error(
        "tensor `{tensor}` in `{}` has dtype `{found}`, expected `{expected}`", path.display()
    )]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The dtype as the file says.
        found: String,
        /// The dtype that goes with the others.
        expected: String,
    },

    // config.json
    /// A field that must be there.
    #[error("`{key}` is missing from `{file}`, expected {expected}")]
    ConfigMissing {
        /// The file.
        file: String,
        /// The field, with its parents.
        key: String,
        /// What the field holds.
        expected: &'static str,
    },
    /// A field of the wrong type or out of range.
    #[error("`{key}` in `{file}` is `{found}`, expected {expected}")]
    ConfigValue {
        /// The file.
        file: String,
        /// The field, with its parents.
        key: String,
        /// The value, as JSON, cut when long.
        found: String,
        /// What the field holds.
        expected: &'static str,
    },
    /// Two spellings of one field that disagree.
    #[error("`{first}` is `{first_value}` but `{second}` is `{second_value}` in `{file}`")]
    ConfigContradiction {
        /// The file.
        file: String,
        /// One spelling.
        first: String,
        /// Its value.
        first_value: String,
        /// The other spelling.
        second: String,
        /// Its value.
        second_value: String,
    },

    // encodings
    /// An encoding name that does not exist.
    #[error(
        "`{name}` is no encoding\nhint: use one of `f32`, `f16`, `bf16`, `q8`, `q4g32`, `q4g64`"
    )]
    UnknownEncoding {
        /// What was asked for.
        name: String,
    },
    /// A weight that the target encoding cannot hold.
    #[error(
        "tensor `{tensor}` holds `{value}` at row `{row}`, column `{column}`, which `{encoding}` \
         cannot store\nhint: the checkpoint is damaged or needs a wider encoding"
    )]
    NotFinite {
        /// Name of the tensor.
        tensor: String,
        /// Row, counting all leading dimensions.
        row: usize,
        /// Column in the row.
        column: usize,
        /// The value found.
        value: f32,
        /// The encoding asked for.
        encoding: Encoding,
    },

    // packed container
    /// A manifest of another format or version.
    #[error(
        "`{}` is of the format `{got}`, this program reads `{wanted}`\n\
         hint: pack the model again with this program, or use the one that packed it",
        path.display()
    )]
    ManifestFormat {
        /// The manifest.
        path: PathBuf,
        /// What we read.
        wanted: String,
        /// What it says it is.
        got: String,
    },
    /// A manifest that contradicts itself or the files.
    #[error("`{subject}` in `{}`: {field} is `{got}`, expected {wanted}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// The tensor, layer or file described.
        subject: String,
        /// The property.
        field: &'static str,
        /// What would be right.
        wanted: String,
        /// What it says.
        got: String,
    },
    /// Bytes that do not have the digest they should.
    #[error(
        "{subject} in `{}` (bytes `{start}..{end}`) has digest `{got}`, expected `{wanted}`\n\
         hint: the file is damaged, pack or download it again",
        path.display()
    )]
    Digest {
        /// The file.
        path: PathBuf,
        /// The tensor, expert or file as a whole.
        subject: String,
        /// First byte covered.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Start of the digest in the manifest.
        wanted: String,
        /// Start of the digest of the bytes there.
        got: String,
    },
    /// Padding that is not zero.
    #[error(
        "padding after {subject} in `{}` has `{got}` at byte `{offset}`, expected `0`\n\
         hint: the file is damaged, pack or download it again",
        path.display()
    )]
    Padding {
        /// The file.
        path: PathBuf,
        /// What the padding follows.
        subject: String,
        /// Where the byte is.
        offset: u64,
        /// The byte there.
        got: u8,
    },

    // packing
    /// A plan that no container can hold.
    #[error("cannot pack `{subject}`: {field} is `{got}`, expected {wanted}")]
    Plan {
        /// The tensor, layer or sidecar planned.
        subject: String,
        /// The property.
        field: &'static str,
        /// What would be right.
        wanted: String,
        /// What was planned.
        got: String,
    },
    /// Something is in the way.
    #[error(
        "`{}` exists and is not empty\nhint: remove it or choose another destination",
        path.display()
    )]
    DestinationExists {
        /// The destination.
        path: PathBuf,
    },
    /// An unfinished pack of something else is in the way.
    #[error(
        "`{}` is an unfinished pack with plan `{got}`, expected `{wanted}`\n\
         hint: it was made from another source or with other options; run that command again to \
         finish it, or remove the folder",
        path.display()
    )]
    OtherPlan {
        /// The partial folder.
        path: PathBuf,
        /// Start of the digest of our plan.
        wanted: String,
        /// Start of the digest of its plan.
        got: String,
    },
    /// A folder that has the name of a partial pack but is none.
    #[error(
        "`{}` holds `{found}`, expected an unfinished pack or nothing\n\
         hint: remove the folder or choose another destination",
        path.display()
    )]
    NotAPartial {
        /// The folder.
        path: PathBuf,
        /// A name in it.
        found: String,
    },
    /// Another process packs to the same destination.
    #[error("another process is packing to `{}`", path.display())]
    Locked {
        /// The partial folder.
        path: PathBuf,
    },
    /// Something is still to be written.
    #[error("the pack `{}` is not complete, next is {next}", path.display())]
    Incomplete {
        /// The partial folder.
        path: PathBuf,
        /// The tensor or expert to write next.
        next: String,
    },
}

impl WeightsError {
    /// Wraps an error of the system.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), action, source }
    }

    /// Wraps an error of a write, telling a full disk apart.
    pub(crate) fn write(path: &Path, offset: u64, wanted: u64, source: io::Error) -> Self {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        let path = path.to_owned();
        match source.kind() {
            StorageFull | QuotaExceeded => Self::DiskFull { path, offset, wanted, source },
            _ => Self::Io { path, action: "write", source },
        }
    }

    /// Wraps an error of the JSON parser.
    pub(crate) fn json(path: &Path, error: &serde_json::Error) -> Self {
        let (line, column, reason) = json_place(error);
        Self::Json { path: path.to_owned(), line, column, reason }
    }

    /// Wraps an error of the JSON parser in a header.
    pub(crate) fn header(path: &Path, error: &serde_json::Error) -> Self {
        let (line, column, reason) = json_place(error);
        Self::Header { path: path.to_owned(), line, column, reason }
    }
}

/// Line, column and what the parser said, which names them again.
fn json_place(error: &serde_json::Error) -> (usize, usize, String) {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let place = format!(" at line {line} column {column}");
    (line, column, text.strip_suffix(&place).unwrap_or(&text).to_owned())
}

/// A short list of names for a message.
fn listed(names: &[String]) -> String {
    if names.is_empty() {
        return "an empty folder".to_owned();
    }
    names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}
