"""The words of charts that nodes may show: see :mod:`.chart_grammar`. What is not here refuses the chart."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VEGA_LITE_WORDS = _words(
    """
aggregate align anchor and angle animationDuration arc area argmax argmin aria ariaRole ariaRoleDescription as aspect
autosize axis axisBand axisBottom axisDiscrete axisLeft axisPoint axisQuantitative axisRight axisTemporal axisTop
axisX axisXBand axisXDiscrete axisXPoint axisXQuantitative axisXTemporal axisY axisYBand axisYDiscrete axisYPoint
axisYQuantitative axisYTemporal background band bandPaddingInner bandPaddingOuter bandPosition bandSize
bandWithNestedOffsetPaddingInner bandWithNestedOffsetPaddingOuter bandwidth bar barBandPaddingInner base baseline bbox
between bin binSpacing bind binned bins blend borders bottom bounds box boxplot calculate category center circle clamp
clear clip clipAngle clipExtent clipHeight coefficient color column columnPadding columns concat condition config
constant consume contains content continuousBandSize continuousHeight continuousPadding continuousWidth coordinates
cornerRadius cornerRadiusBottomLeft cornerRadiusBottomRight cornerRadiusEnd cornerRadiusTopLeft cornerRadiusTopRight
count countTitle counts cumulative cursor data datasets date datum day default delimiter density description detail
dir direction disable discreteBandSize discreteHeight discreteWidth distance diverging divide domain domainCap
domainColor domainDash domainDashOffset domainMax domainMid domainMin domainOpacity domainRaw domainWidth dx dy
ellipsis empty encoding encodings endAngle equal errorband errorbar exponent expr extent extentMajor extentMinor facet
feature features field fieldTitle fields fill fillColor fillOpacity filled filter fit flatten fold font fontSize
fontStyle fontWeight for format formatType fraction frame from gamma geometries geometry geoshape gradient
gradientDirection gradientHorizontalMaxLength gradientHorizontalMinLength gradientLabelLimit gradientLabelOffset
gradientLength gradientOpacity gradientStrokeColor gradientStrokeWidth gradientThickness gradientVerticalMaxLength
gradientVerticalMinLength graticule grid gridAlign gridCap gridColor gridDash gridDashOffset gridOpacity gridWidth
group-subtitle group-title groupby gt gte guide-label guide-title hconcat header headerColumn headerFacet headerRow
heatmap height hours id impute innerRadius interpolate interval invalid joinaggregate key keyvals labelAlign
labelAnchor labelAngle labelBaseline labelBound labelColor labelExpr labelFlush labelFlushOffset labelFont
labelFontSize labelFontStyle labelFontWeight labelLimit labelLineHeight labelOffset labelOpacity labelOrient
labelOverlap labelPadding labelSeparation labels latitude latitude2 layer layout left legend legendX legendY limit
line lineBreak lineHeight lobes loess longitude longitude2 lookup lt lte mark markname marktype max maxBandSize
maxExtent maxFontSize maxOpacity maxSize maxStrokeWidth maxbins maxsteps median merge mesh method milliseconds min
minBandSize minExtent minFontSize minOpacity minSize minStrokeWidth minstep minsteps minutes month name nearest nice
normalizedNumberFormat normalizedNumberFormatType not number numberFormat numberFormatType offset
offsetBandPaddingInner offsetBandPaddingOuter on oneOf op opacity options or order ordinal orient outerRadius outliers
padAngle padding paddingInner paddingOuter parallel parallels param params parse percent pivot point pointPadding
pointRadius position precision probs projection properties property quantile quantileCount quantizeCount quarter r1 r2
radius radius2 radius2Offset radiusOffset ramp range rangeMax rangeMin ratio rect rectBandPaddingInner reflectX
reflectY regression repeat rescale resize resolve reverse right rotate round row rowPadding rule sample scale scheme
seconds select selection sequence shape size smooth sort source spacing spec sphere square stack start startAngle step
stepMajor stepMinor steps stop stops stream stroke strokeCap strokeColor strokeDash strokeDashOffset strokeJoin
strokeMiterLimit strokeOffset strokeOpacity strokeWidth style subtitle subtitleColor subtitleFont subtitleFontSize
subtitleFontStyle subtitleFontWeight subtitleLineHeight subtitlePadding symbol symbolBaseFillColor
symbolBaseStrokeColor symbolDash symbolDashOffset symbolDirection symbolFillColor symbolLimit symbolOffset
symbolOpacity symbolSize symbolStrokeColor symbolStrokeWidth symbolType tension test text theta theta2 theta2Offset
thetaOffset thickness throttle tick tickBand tickBandPaddingInner tickCap tickColor tickCount tickDash tickDashOffset
tickExtra tickMinStep tickOffset tickOpacity tickRound tickSize tickWidth ticks tilt timeFormat timeFormatType
timeUnit timeUnitBandPosition timeUnitBandSize title titleAlign titleAnchor titleAngle titleBaseline titleColor
titleFont titleFontSize titleFontStyle titleFontWeight titleLimit titleLineHeight titleOpacity titleOrient
titlePadding titleX titleY toggle tooltip tooltipFormat top trail transform translate type unionWith unit
unselectedOpacity useUnaggregatedDomain utc valid value values vconcat view views width window x x1 x2 x2Offset xError
xError2 xOffset xReverse y y1 y2 y2Offset yError yError2 yOffset year zero zindex zoom
"""
)
"""Keys, of the JSON schema of Vega-Lite 5, but for those of addresses, pictures, places in the page, the renderer."""
VEGA_LITE_TYPES = _words(
    """
Feature FeatureCollection GeometryCollection LineString MultiLineString MultiPoint MultiPolygon Point Polygon albers
albersUsa arc area azimuthalEqualArea azimuthalEquidistant band bar bin-ordinal boxplot circle click conicConformal
conicEqualArea conicEquidistant csv cubehelix cubehelix-long dblclick dsv equalEarth equirectangular errorband
errorbar fit fit-x fit-y geojson geoshape gnomonic gradient identity interval json line linear log mercator mousedown
mousemove mouseout mouseover mouseup mousewheel naturalEarth1 nominal none ordinal orthographic pad point pointerdown
pointermove pointerout pointerover pointerup pow quantile quantitative quantize rect rgb rule sequential sqrt square
stereographic symbol symlog temporal text threshold tick time topojson trail transverseMercator tsv utc wheel
"""
)
"""Marks, encodings, scales, projections, formats."""
VEGA_WORDS = _words(
    """
a aggregate aggregate_params align alpha alphaMin alphaTarget anchor angle arc aria ariaRole ariaRoleDescription as
aspect autosize avoidBaseMark avoidMarks axes axis axisBand axisBottom axisDiscrete axisLeft axisPoint
axisQuantitative axisRight axisTemporal axisTop axisX axisY b background band bandPosition bandwidth base baseline
between bind bins blend bottom bounds c case category cell cellSize center clamp clip clipAngle clipExtent clipHeight
color column columnFooter columnHeader columnPadding columnTitle columns config constant consume contains copy
cornerRadius cornerRadiusBottomLeft cornerRadiusBottomRight cornerRadiusTopLeft cornerRadiusTopRight count counts
cross cumulative cursor data date datum day default defined delimiter description dir direction distance distanceMax
distanceMin distribution distributions diverging divide domain domainCap domainColor domainDash domainDashOffset
domainImplicit domainMax domainMid domainMin domainOpacity domainRaw domainWidth dx dy ellipsis encode endAngle enter
entries events exit exponent expr extent extentMajor extentMinor extra facet feature field fields fill fillColor
fillOpacity filter fit font fontSize fontSizeRange fontStyle fontWeight footerBand force forces format formatType
frame from function g gamma generate geojson gradient gradientLength gradientOpacity gradientStrokeColor
gradientStrokeWidth gradientThickness grid gridAlign gridCap gridColor gridDash gridDashOffset gridOpacity gridScale
gridWidth group group-subtitle group-title groupby groups guide-label guide-title h header headerBand heatmap height
hours hover id ignore ignorePeers index init innerRadius interactive interpolate interval iterations key keys keyvals
l labelAlign labelAngle labelBaseline labelBound labelColor labelFlush labelFlushOffset labelFont labelFontSize
labelFontStyle labelFontWeight labelLimit labelLineHeight labelOffset labelOpacity labelOverlap labelPadding
labelSeparation labels layout left legend legendX legendY legends level levels limit line lineAnchor lineBreak
lineHeight links mark markIndex markname marks marktype max maxExtent maxbins maxsteps mean merge mesh method
milliseconds min minExtent minstep minsteps minutes month mult name nice nodeSize offset on op opacity ops order
ordinal orient outerRadius padAngle padding paddingBottom paddingInner paddingLeft paddingOuter paddingRight
paddingTop parallels params parent parentKey parse path pattern pointRadius position precision probs projection
projections property push quarter query r r1 r2 radius ramp range ratio rect require resize resolve restart reverse
right role rotate round row rowFooter rowHeader rowPadding rowTitle rule s scale scaleX scaleY scales scheme seconds
separation shape signal signals size smooth sort source sourceX sourceY span sphere spiral start startAngle static
stdev step stepMajor stepMinor steps stop stops stopwords stream strength stroke strokeCap strokeColor strokeDash
strokeDashOffset strokeForeground strokeJoin strokeMiterLimit strokeOffset strokeOpacity strokeWidth style subtitle
subtitleColor subtitleFont subtitleFontSize subtitleFontStyle subtitleFontWeight subtitleLineHeight subtitlePadding
symbol symbolDash symbolDashOffset symbolFillColor symbolLimit symbolOffset symbolOpacity symbolSize symbolStrokeColor
symbolStrokeWidth symbolType symbols targetX targetY tension test text theta thresholds throttle tickBand tickCap
tickColor tickCount tickDash tickDashOffset tickExtra tickMinStep tickOffset tickOpacity tickRound tickSize tickWidth
ticks title titleAlign titleAnchor titleAngle titleBand titleBaseline titleColor titleFont titleFontSize
titleFontStyle titleFontWeight titleLimit titleLineHeight titleOpacity titleOrient titlePadding titleX titleY tooltip
top trail transform translate type units update value values velocityDecay view week weight weights width x x1 x2 xc y
y1 y2 yc year zero zindex
"""
)
"""Keys, of the JSON schema of Vega 5, with the same left out."""
VEGA_TYPES = _words(
    """
aggregate arc area band bin bin-ordinal click collect contour countpattern cross crossfilter csv dblclick density
dotbin dsv extent filter fit fit-x fit-y flatten fold force formula geojson geopath geopoint geoshape gradient
graticule group heatmap identifier identity impute isocontour joinaggregate json kde kde2d label line linear linkpath
loess log lookup mousedown mousemove mouseout mouseover mouseup nest none ordinal pack pad partition path pie pivot
point pointerdown pointermove pointerout pointerover pointerup pow project quantile quantize rect regression
resolvefilter rule sample sequence sequential shape sqrt stack stratify symbol symlog text threshold time timeunit
topojson trail tree treelinks treemap tsv utc voronoi wheel window wordcloud
"""
)
"""Marks, scales, transforms, formats."""
PLOTLY_WORDS = _words(
    """
a a0 aaxis active activebgcolor activecolor align alignmentgroup alphahull ambient anchor angle angleref angularaxis
annotationdefaults annotations args args2 arrangement array arraydtick arrayminus arraytick0 arrowcolor arrowhead
arrowlen arrowref arrowside arrowsize arrowwidth aspectmode aspectratio atype autobinx autobiny autocolorscale
autocontour autoexpand automargin autorange autorangeoptions autoshift autosize autotickangles autotypenumbers ax axis
axref ay ayref b b0 backgroundcolor backoff bandwidth bar barcornerradius bargap bargroupgap barmode barnorm base
baseframe baseratio baxis bdata bgcolor bingroup bordercolor borderpad borderwidth bounds box boxgap boxgroupgap
boxmean boxmode boxpoints branchvalues btype bundlecolors buttondefaults buttons c calendar camera caps captureevents
carpet categoryarray categoryorder cauto caxis cells center cheaterslope cheatertype clickanywhere clickmode
clicktoshow clipmax clipmin cliponaxis close cmax cmid cmin color coloraxis colorbar coloring colormodel colors
colorscale colorscaledefaults colorscales colorway column columnorder columns columnwidth computed connectgaps
connector constrain constraintext constraintoward constraintrange contour contours copy_ystyle copy_zstyle
cornerradius count counts cumulative currentbin currentvalue customdata da dash datarevision db decreasing
delaunayaxis delta depthfade diagonal diffuse dimensiondefaults dimensions direction displayindex diverging
dividercolor dividerwidth dlabel domain dr dragmode dtheta dtick dtickrange dtype duration dvalue dx dy easing
edgeshape editable editrevision enabled end endline endlinecolor endlinewidth entrywidth entrywidthmode error_x
error_y error_z execute exponentformat extendfunnelareacolors extendiciclecolors extendpiecolors extendsunburstcolors
extendtreemapcolors eye facecolor facenormalsepsilon family fgcolor fgopacity fill fillcolor fillgradient fillmode
fillpattern fillrule fixedrange flatshading flip font format frame fresnel fromcurrent funnel funnelareacolorway
funnelgap funnelgroupgap funnelmode gauge gradient grid gridcolor griddash gridshape gridwidth group groupclick
groupdoubleclick groupnorm groups grouptitlefont header height hiddenlabels hidesurface high highlight highlightcolor
highlightwidth histfunc histnorm hole hoveranywhere hovercolor hoverdistance hoverformat hoverinfo hoverlabel
hovermode hoveron hoverongaps hoversort hoversubplots hovertemplate hovertemplatefallback hovertext i iciclecolorway
ids imag imaginaryaxis immediate include increasing indentation insiderange insidetextanchor insidetextfont
insidetextorientation intensity intensitymode isomax isomin itemclick itemdoubleclick itemsizing itemwidth j jitter k
l label label0 labelalias labelangle labelfont labelformat labelpadding labelprefix labels labelside labelsuffix layer
leaf legend legendgroup legendgrouptitle legendrank legendwidth len lengthfactor lengthmode lenmode level lighting
lightposition line linecolor lineposition linewidth link locations low lowerfence margin marker matches maxallowed
maxdepth maxdisplayed maxheight mean meanline measure median meta method min minallowed minexponent minor
minorgridcolor minorgridcount minorgriddash minorgridwidth minorloglabels minorticklen minreducedheight
minreducedwidth minsize mirror mode modebardisable multiselect name namelength nbinsx nbinsy ncontours node notched
notchspan notchwidth nticks number offset offsetgroup opacity opacityscale open operation ordering orientation
outliercolor outlierwidth outlinecolor outlinewidth outsidetextfont overlaying packing pad padding paper_bgcolor
parents path pathbar pattern period piecolorway plot_bgcolor pointpos points polar position prefix project projection
pull q1 q3 quartilemethod r r0 radialaxis range rangebreakdefaults rangebreaks rangefont rangemode rangeselector
rangeslider real realaxis redraw reference relative reversescale root rotation roughness row roworder rows scale
scaleanchor scalegroup scalemode scaleratio scattergap scattermode scene sd sdmultiple sector selectdirection selected
selectedpoints selectiondefaults selectionrevision selections separatethousands separators sequential sequentialminus
shadow shape shapedefaults shapes shift show showactive showarrow showaxeslabels showbackground showdividers
showexponent showgrid showlabels showlegend showline showlines showlowerhalf showscale showspikes showticklabels
showtickprefix showticksuffix showupperhalf showwhiskers side simplify size sizemin sizemode sizeref slices
sliderdefaults sliders smith smoothing solidity sort sortpaths spaceframe span spanmode specular spikecolor spikedash
spikedistance spikemode spikesides spikesnap spikethickness split squarifyratio stackgaps stackgroup standoff start
startarrowhead startarrowsize startline startlinecolor startlinewidth starts startstandoff step stepdefaults stepmode
steps stop style subplot subplots subtitle suffix sum sunburstcolorway surface surfaceaxis surfacecolor symbol
symmetric t target templateitemname ternary text textangle textcase textfont textinfo textposition texttemplate
texttemplatefallback theta theta0 thetaunit thickness thicknessmode threshold tick0 tickangle tickcolor tickfont
tickformat tickformatstopdefaults tickformatstops ticklabelindex ticklabelmode ticklabeloverflow ticklabelposition
ticklabelshift ticklabelstandoff ticklabelstep ticklen tickmode tickprefix ticks tickson ticksuffix ticktext tickvals
tickwidth tiling title titleclick titledoubleclick totals tracegroupgap traceorder traceref tracerefminus traces
transition transpose treemapcolorway type u uhoverformat uid uirevision unifiedhovertitle uniformtext unselected up
updatemenudefaults updatemenus upperfence usecolormap v valign value valueformat valuehoverformat valueminus values
valuesuffix variant vertexcolor vertexnormalsepsilon vhoverformat violingap violingroupgap violinmode visible w
waterfallgap waterfallgroupgap waterfallmode weight whiskerwidth whoverformat width x x0 x0shift x1 x1shift xanchor
xaxes xaxis xbingroup xbins xcalendar xclick xgap xhoverformat xpad xperiod xperiod0 xperiodalignment xref xshift
xside xsizemode xtype y y0 y0shift y1 y1shift yanchor yaxes yaxis ybingroup ybins ycalendar yclick ygap yhoverformat
ypad yperiod yperiod0 yperiodalignment yref yshift yside ysizemode ytype z zauto zaxis zcalendar zeroline
zerolinecolor zerolinelayer zerolinewidth zhoverformat zmax zmid zmin zorder zsmooth
"""
)
"""Keys of traces and layouts, of plotly 7's schema, but for maps, pictures, the bar of buttons and ``template``."""
PLOTLY_TRACES = _words(
    """
bar barpolar box candlestick carpet cone contour contourcarpet funnel funnelarea heatmap histogram histogram2d
histogram2dcontour icicle image indicator isosurface mesh3d ohlc parcats parcoords pie quiver sankey scatter scatter3d
scattercarpet scattergl scatterpolar scatterpolargl scattersmith scatterternary splom streamtube sunburst surface
table treemap violin volume waterfall
"""
)
"""All but those that load maps."""
PLOTLY_TYPES = _words(
    """
- buttons category circle constant constraint data date dropdown horizontal levels line linear log multicategory none
orthographic path percent perspective radial rect sqrt vertical
"""
)
"""Types of axes, shapes, menus, gradients and error bars."""
PLOTLY_MAPS = _words(
    "choropleth choroplethmap choroplethmapbox densitymap densitymapbox scattergeo scattermap scattermapbox"
)
"""Traces that load shapes or tiles from servers."""
PLOTLY_NUMBERED = _words("xaxis yaxis scene polar ternary smith coloraxis legend")
"""A layout may have several of these: ``xaxis2``."""
